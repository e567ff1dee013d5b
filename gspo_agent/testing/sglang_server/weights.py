"""What a server is given as weights without a file between, held so that it can be read back."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gspo_agent.background import off_loop

_TIMEOUT = timedelta(seconds=60)


class Weights:
    """Of every tensor-parallel rank, each of which has whole tensors here."""

    def __init__(self, ranks: int) -> None:
        self.tensors: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        self.groups: dict[str, list[Any]] = {}
        """Name -> the process group as each rank is in it."""

    async def join(self, name: str, body: Mapping[str, Any]) -> None:
        """Raises RuntimeError where the others do not come."""
        port, first, size = int(body["master_port"]), int(body["rank_offset"]), int(body["world_size"])

        def join(rank: int) -> Any:
            store = TCPStore(body["master_address"], port, is_master=False, timeout=_TIMEOUT)
            inner = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            return distributed.ProcessGroupGloo(inner, first + rank, size, _TIMEOUT)

        self.groups[name] = await self._each(join)

    async def receive(self, name: str, body: Mapping[str, Any]) -> None:
        """One broadcast of a flattened bucket. Raises RuntimeError where it breaks."""
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)
        ]
        groups = self.groups[name]

        def receive(rank: int) -> Tensor:
            row = torch.empty(sum(sizes), dtype=torch.uint8)
            groups[rank].broadcast([row], distributed.BroadcastOptions()).wait(_TIMEOUT)
            return row

        for tensors, row in zip(self.tensors, await self._each(receive), strict=True):
            parts = torch.split(row, sizes)
            for key, part, dtype, shape in zip(body["names"], parts, dtypes, body["shapes"], strict=True):
                tensors[key] = part.view(dtype).view(shape)

    def unpack(self, handles: Sequence[str]) -> None:
        """Each rank takes its own. Raises ValueError for what is none."""
        if len(handles) != len(self.tensors):
            raise ValueError(f"{len(handles)} handles for {len(self.tensors)} tensor-parallel ranks")
        try:
            found = [dict(pickle.loads(base64.b64decode(handle, validate=True))) for handle in handles]
        except Exception as error:
            raise ValueError(f"serialized_named_tensors: {error}") from None
        for tensors, new in zip(self.tensors, found, strict=True):
            tensors.update(new)

    def read(self, name: str, most: int) -> list[Any] | None:
        tensor = self.tensors[0].get(name)
        rows: list[Any] | None = None if tensor is None else tensor.float()[:most].tolist()
        return rows

    async def _each(self, work: Callable[[int], Any]) -> list[Any]:
        return list(await asyncio.gather(*(off_loop(work, rank) for rank in range(len(self.tensors)))))
