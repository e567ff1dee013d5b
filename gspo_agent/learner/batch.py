"""Groups -> padded tensors. The only place that decides what is trainable, and the only shift between a token and the
position whose logits predict it.

Axes: B rows, T positions. Position t holds the token read (`inputs`) and the token predicted there (`targets`); mask,
logprobs and lags belong to the predicted token. Padding is on the right, so that a causal model needs no mask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_agent.learner.advantages import group_advantages
from gspo_agent.trajectory import Group, Row, Trajectory, version_step


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one training step, or a part of them."""

    step: int
    """The training step that consumes them."""
    inputs: Tensor
    """[B, T] int64"""
    targets: Tensor
    """[B, T] int64"""
    loss_mask: Tensor
    """[B, T] bool: the policy sampled the target, and it is not too old."""
    rollout_logprobs: Tensor
    """[B, T] float32 as the engine reported them; 0 where the mask is False."""
    weight_lags: Tensor
    """[B, T] int32: `step` minus the step of the weights that sampled the target; 1 is fresh. 0 where not sampled."""
    advantages: Tensor
    """[B] float64"""
    trajectory_ids: Tensor
    """[B] int64: rows of one trajectory agree."""
    lengths: Tensor
    """[B] int64: positions that are not padding."""
    metrics: dict[str, float]
    """Of the whole batch."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_trajectories(self) -> int:
        return len(torch.unique(self.trajectory_ids))

    def rows(self, indices: Tensor) -> Batch:
        """Those rows, without the padding that none of them needs."""
        end = int(self.lengths[indices].max()) if len(indices) else 0
        chosen: dict[str, Any] = {name: getattr(self, name)[indices] for name in _PER_ROW}
        return replace(self, **chosen, **{name: getattr(self, name)[indices, :end] for name in _PER_TOKEN})

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in (*_PER_ROW, *_PER_TOKEN)}
        return replace(self, **moved)


_PER_ROW = ("advantages", "trajectory_ids", "lengths")
_PER_TOKEN = ("inputs", "targets", "loss_mask", "rollout_logprobs", "weight_lags")


@dataclass(frozen=True, slots=True)
class _Shifted:
    """One row as positions, up to the last trained token: [T - 1] views of T tokens."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    weight_lags: NDArray[np.int64]
    stale: int
    """Tokens that only their age excludes."""


def make_batch(
    groups: Sequence[Group],
    *,
    step: int,
    max_weight_lag: int | None,
    advantage_std: bool,
    author: str = "policy",
) -> Batch:
    """Pads the rows of all trajectories, in order.

    A token is trained if the engine named `author` sampled it, under weights at most `max_weight_lag` steps older than
    `step` (None: of any age). What is not trained leaves ratio, length and gradient together. A trajectory with nothing
    to train stays a row, and so counts in the mean over trajectories.

    Raises ValueError where a trajectory begins with a sampled token: no position predicts it.
    """
    rows: list[_Shifted] = []
    advantages: list[float] = []
    trajectory_ids: list[int] = []
    members = [trajectory for group in groups for trajectory in group.trajectories]
    values = [group_advantages(group.rewards, std=advantage_std) for group in groups]
    for number, (trajectory, advantage) in enumerate(zip(members, np.concatenate([*values, []]), strict=True)):
        shifted = [_shift(row, trajectory, author, step, max_weight_lag) for row in trajectory.rows()] or [_EMPTY]
        rows += shifted
        advantages += [float(advantage)] * len(shifted)
        trajectory_ids += [number] * len(shifted)
    return Batch(
        step=step,
        inputs=_pad([row.inputs for row in rows], torch.int64),
        targets=_pad([row.targets for row in rows], torch.int64),
        loss_mask=_pad([row.loss_mask for row in rows], torch.bool),
        rollout_logprobs=_pad([row.rollout_logprobs for row in rows], torch.float32),
        weight_lags=_pad([row.weight_lags for row in rows], torch.int32),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        trajectory_ids=torch.tensor(trajectory_ids, dtype=torch.int64),
        lengths=torch.tensor([len(row.inputs) for row in rows], dtype=torch.int64),
        metrics=_metrics(groups, values, rows),
    )


def _shift(row: Row, trajectory: Trajectory, author: str, step: int, max_weight_lag: int | None) -> _Shifted:
    if row.sampled[0]:
        raise ValueError(f"trajectory {trajectory.id} begins with a sampled token; a prompt must come first")
    versions, place = np.unique(row.weight_versions, return_inverse=True)
    lags = np.where(row.sampled, step - np.array([version_step(int(version)) for version in versions])[place], 0)
    ours = row.sampled & _written_by(author, trajectory, row)
    young = np.ones_like(ours) if max_weight_lag is None else lags <= max_weight_lag
    trained = ours & young
    end = int(trained.nonzero()[0].max(initial=0)) + 1  # no trained token reads what comes after the last of them
    return _Shifted(
        inputs=row.token_ids[: end - 1],
        targets=row.token_ids[1:end],
        loss_mask=trained[1:end],
        rollout_logprobs=np.where(trained, row.rollout_logprobs, np.float32(0))[1:end],
        weight_lags=lags[1:end],
        stale=int((ours & ~young).sum()),
    )


def _written_by(author: str, trajectory: Trajectory, row: Row) -> NDArray[np.bool_]:
    """[T] A row does not say which engine sampled a token; its segments do, in the row's order."""
    written = [np.full(len(segment), segment.author == author) for segment in trajectory.segments]
    mask: NDArray[np.bool_] = np.concatenate(written)
    if len(mask) != len(row):
        raise ValueError(f"trajectory {trajectory.id}: {len(mask)} tokens in segments but {len(row)} in a row")
    return mask


_EMPTY = _Shifted(
    inputs=np.zeros(0, np.int32),
    targets=np.zeros(0, np.int32),
    loss_mask=np.zeros(0, np.bool_),
    rollout_logprobs=np.zeros(0, np.float32),
    weight_lags=np.zeros(0, np.int64),
    stale=0,
)


def _pad(rows: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    """[B, T]; the padding is 0, or False."""
    padded = torch.zeros(len(rows), max((len(row) for row in rows), default=0), dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.from_numpy(row)
    return padded


def _metrics(
    groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]], rows: Sequence[_Shifted]
) -> dict[str, float]:
    rewards = np.array([reward for group in groups for reward in group.rewards if np.isfinite(reward)] or [0.0])
    trained = np.array([row.loss_mask.sum() for row in rows] or [0])
    lags = np.concatenate([row.weight_lags[row.loss_mask] for row in rows] or [_EMPTY.weight_lags])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups": float(len(groups)),
        "groups_without_advantage": float(sum(not values.any() for values in advantages)),
        "rows": float(len(rows)),
        "empty_rows": float((trained == 0).sum()) if rows else 0.0,
        "trained_tokens": float(trained.sum()),
        "trained_tokens/mean": float(trained.mean()),
        "trained_tokens/max": float(trained.max()),
        "stale_tokens": float(sum(row.stale for row in rows)),
        "weight_lag/mean": float(lags.mean()) if len(lags) else 0.0,
        "weight_lag/max": float(lags.max()) if len(lags) else 0.0,
    }
