"""What SGLang needs of its kernels on a machine without a GPU, where the wheel's own cannot be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, stride: int
) -> None:
    """Notes for each request where in the cache the keys and values of its next tokens lie."""
    taken = 0
    for index, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[index, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


# Pinning memory needs a GPU, and layers with adapters do it whatever they run on.
for _name in ("tensor", "zeros", "ones", "empty"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign, assignment, misc]
