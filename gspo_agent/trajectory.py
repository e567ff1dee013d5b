"""What an episode leaves behind: segments of tokens, messages, rewards; and groups of episodes.

Everything here is append-only. Masks, logprobs and versions per token are derived from the segments, never kept
beside them, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gspo_agent.messages import Message

ENV = "env"
_STEPS_PER_LIFE = 1_000_000
_ROUNDING = 1e-7  # relative; about float32's resolution: rewards closer than this differ by how they were summed
_CANCELLED = 1e-12  # what is left of a sum of weighted components that is 0


def weight_version(life: int, step: int) -> int:
    """The one number for the weights after `step` in the `life`-th life of a run: life 3, step 12 is 3000012.

    A life begins whenever a process opens the run, so a version never names two different weights.
    """
    if not (life >= 0 and 0 <= step < _STEPS_PER_LIFE):
        raise ValueError(f"life {life}, step {step}: both must be >= 0 and step below {_STEPS_PER_LIFE}")
    return life * _STEPS_PER_LIFE + step


def version_step(version: int) -> int:
    """The training step of a weight version; lag is a difference of these."""
    return version % _STEPS_PER_LIFE


class Status(StrEnum):
    PARTIAL = "partial"
    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens with one author, at one weight version.

    >>> Segment([5, 6], author="policy", logprobs=[-0.1, -2.0], weight_version=1000003, turn=0)
    """

    token_ids: NDArray[np.int32]
    """[L]"""
    author: str = ENV
    """"env", or the name of the engine that sampled the tokens."""
    logprobs: NDArray[np.float32] | None = None
    """[L] as the engine reported them when it sampled; None for "env"."""
    weight_version: int | None = None
    turn: int = 0
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Declared per-token side data, first axis L."""

    def __init__(
        self,
        token_ids: ArrayLike,
        author: str = ENV,
        logprobs: ArrayLike | None = None,
        weight_version: int | None = None,
        turn: int = 0,
        extras: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "token_ids", np.asarray(token_ids, dtype=np.int32))
        put(self, "author", author)
        put(self, "logprobs", None if logprobs is None else np.asarray(logprobs, dtype=np.float32))
        put(self, "weight_version", weight_version)
        put(self, "turn", turn)
        put(self, "extras", dict(extras or {}))
        self._check()

    def _check(self) -> None:
        length = len(self.token_ids)
        if self.author == ENV:
            if self.logprobs is not None or self.weight_version is not None:
                raise ValueError("an environment's segment has neither logprobs nor a weight version")
        elif self.logprobs is None or self.weight_version is None:
            raise ValueError(f"a segment by {self.author!r} needs logprobs and a weight version")
        elif len(self.logprobs) != length:
            raise ValueError(f"{length} token ids but {len(self.logprobs)} logprobs by {self.author!r}")
        # The product is finite only where every one is, and takes a third of the time.
        elif not math.isfinite(np.dot(self.logprobs, self.logprobs)) and not np.isfinite(self.logprobs).all():
            raise ValueError(f"a logprob by {self.author!r} is not finite: {self.logprobs!r}")
        for name, values in self.extras.items():
            if len(values) != length:
                raise ValueError(f"{length} token ids but {len(values)} rows of {name!r}")

    @classmethod
    def of(
        cls, token_ids: NDArray[np.int32], author: str, logprobs: NDArray[np.float32], weight_version: int
    ) -> Segment:
        """Sampled tokens that have been checked, one by one, by who calls."""
        fields: tuple[object, ...] = (token_ids, author, logprobs, weight_version, 0, {})
        made, put = object.__new__(cls), object.__setattr__
        for name, value in zip(cls.__slots__, fields, strict=True):
            put(made, name, value)
        return made

    def of_turn(self, turn: int) -> Segment:
        """The same tokens as a part of `turn`; shares the arrays."""
        return self if self.turn == turn else self._with(turn=turn)

    def _with(self, **fields: Any) -> Segment:
        # Past __init__, because what was checked once need not be checked again.
        made, put = object.__new__(Segment), object.__setattr__
        for name in Segment.__slots__:
            put(made, name, fields[name] if name in fields else getattr(self, name))
        return made

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> bool:
        return self.author != ENV

    def continues(self, other: Segment) -> bool:
        """Whether `self`, coming right after `other`, is the same author at the same version in the same turn."""
        return (
            self.author == other.author
            and self.weight_version == other.weight_version
            and self.turn == other.turn
            and self.extras.keys() == other.extras.keys()
        )

    def join(self, other: Segment) -> Segment:
        """Both as one. Raises ValueError where `other` does not continue this."""
        if not other.continues(self):
            raise ValueError(f"{other!r} does not continue {self!r}")
        logprobs = None
        if self.logprobs is not None and other.logprobs is not None:
            logprobs = np.concatenate([self.logprobs, other.logprobs])
        return self._with(
            token_ids=np.concatenate([self.token_ids, other.token_ids]),
            logprobs=logprobs,
            extras={name: np.concatenate([values, other.extras[name]]) for name, values in self.extras.items()},
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward. `turn` is None where it belongs to the whole episode."""

    turn: int | None
    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row: the [T] views of a trajectory."""

    token_ids: NDArray[np.int32]
    """[T]"""
    sampled: NDArray[np.bool_]
    """[T] True where an engine sampled the token."""
    rollout_logprobs: NDArray[np.float32]
    """[T] as the engine reported them; 0 where nothing was sampled."""
    weight_versions: NDArray[np.int64]
    """[T] -1 where nothing was sampled."""
    turns: NDArray[np.int32]
    """[T]"""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Trajectory:
    """One episode, finished or not. Append-only: `append` is the only writer of tokens."""

    group_id: int
    index: int
    attempt: int
    seed: int
    segments: list[Segment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    status: Status = Status.PARTIAL
    stop_reason: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment reported beside the reward; shown, never trained on."""

    @property
    def id(self) -> str:
        return f"{self.group_id}.{self.index}.{self.attempt}"

    @property
    def reward(self) -> float:
        return float(sum(reward.value for reward in self.rewards))

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(len(segment) for segment in self.segments if segment.sampled)

    def sampled_by_step(self) -> dict[int, int]:
        """Step of the weights -> tokens that they sampled."""
        tokens: Counter[int] = Counter()
        for segment in self.segments:
            if segment.weight_version is not None:
                tokens[version_step(segment.weight_version)] += len(segment)
        return dict(tokens)

    def append(self, segment: Segment) -> None:
        """Adds tokens at the end; a segment that agrees with the last one is merged into it."""
        if not len(segment):
            return
        if self.segments and segment.continues(self.segments[-1]):
            self.segments[-1] = self.segments[-1].join(segment)
        else:
            self.segments.append(segment)

    def token_ids(self) -> NDArray[np.int32]:
        """[T] all tokens so far: what the next request is prompted with."""
        if not self.segments:
            return np.zeros(0, dtype=np.int32)
        return np.concatenate([segment.token_ids for segment in self.segments])

    def rows(self) -> list[Row]:
        """The training rows; one as long as a history cannot branch."""
        if not self.segments:
            return []
        parts = self.segments
        return [
            Row(
                token_ids=self.token_ids(),
                sampled=np.concatenate([np.full(len(s), s.sampled) for s in parts]),
                rollout_logprobs=np.concatenate(
                    [np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in parts]
                ),
                weight_versions=np.concatenate(
                    [np.full(len(s), -1 if s.weight_version is None else s.weight_version, np.int64) for s in parts]
                ),
                turns=np.concatenate([np.full(len(s), s.turn, np.int32) for s in parts]),
            )
        ]


@dataclass(slots=True)
class Group:
    """The trajectories of one task, as the learner gets them. Only scored members are in it."""

    id: int
    task: Mapping[str, Any]
    trajectories: Sequence[Trajectory]

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether finite rewards differ by rounding alone: such a group teaches nothing, and its advantages are 0.

    Decided here alone, for the lease that leaves flat groups out and for the learner that has to train on them.
    """
    if not rewards:
        return True
    lowest, highest = min(rewards), max(rewards)
    return highest - lowest <= max(_ROUNDING * max(-lowest, highest), _CANCELLED)
