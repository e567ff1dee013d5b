"""The tokens that a loss sees: the selected ones of all rows in one line.

Axes: B rows, T positions, N selected tokens. A trajectory is one row unless `trajectory_ids` says that several rows
belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a mask excludes is not here, so it cannot reach any sum. float64, the logprobs with their graph."""

    mask: Tensor
    """[B, T] bool"""
    logprobs: Tensor
    """[N]"""
    log_ratio: Tensor
    """[N] logprobs - old_logprobs"""
    advantages: Tensor
    """[N]"""
    trajectory: Tensor
    """[N] 0 to num_trajectories - 1"""
    num_trajectories: int
    num_refused: Tensor
    """Masked-in tokens without a finite old logprob; they are neutral."""

    @classmethod
    def select(
        cls, logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, advantages: Tensor, ids: Tensor | None
    ) -> Tokens:
        shape = logprobs.shape
        same_shape(shape, old_logprobs=old_logprobs, loss_mask=loss_mask)
        if advantages.dim() == 1:
            same_shape(shape[:1], advantages=advantages)
            advantages = advantages[:, None].expand(shape)
        same_shape(shape, advantages=advantages)
        rows = torch.arange(shape[0], device=logprobs.device)
        num_trajectories = shape[0]
        if ids is not None:
            same_shape(shape[:1], trajectory_ids=ids)
            distinct, rows = torch.unique(ids.to(logprobs.device), return_inverse=True)
            num_trajectories = len(distinct)
        wanted = loss_mask.bool()
        mask = wanted & old_logprobs.isfinite()
        chosen = logprobs[mask].double()
        return cls(
            mask,
            chosen,
            chosen - old_logprobs.detach()[mask].double(),
            advantages.detach()[mask].double(),
            rows[:, None].expand(shape)[mask],
            num_trajectories,
            wanted.sum() - mask.sum(),
        )

    def means(self, values: Tensor, unit: Tensor | None = None, num_units: int | None = None) -> Tensor:
        """[num_units, ...] the mean of `values` [N, ...] over each unit's tokens; 0 for a unit without any."""
        unit = self.trajectory if unit is None else unit
        num_units = self.num_trajectories if num_units is None else num_units
        sums = values.new_zeros(num_units, *values.shape[1:]).index_add(0, unit, values)
        counts = torch.bincount(unit, minlength=num_units).clamp(min=1)
        return sums / counts.view(-1, *[1] * (values.dim() - 1))


def same_shape(shape: torch.Size, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; here it must be {list(shape)}")
