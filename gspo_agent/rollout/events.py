"""The events of an episode, and the episode they add up to.

An `Episode` changes only by `event.apply(episode)`, while it is played and when it is read back alike; so what a
journal restores is what was there. Any prefix of an episode's events is a valid episode.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import orjson

from gspo_agent.errors import JournalError, boundary
from gspo_agent.messages import Message
from gspo_agent.rollout.state import (
    NO_BLOBS,
    SAME,
    LoadBlob,
    Same,
    State,
    float32_bytes,
    get_extras,
    get_state,
    put_extras,
    put_state,
)
from gspo_agent.trajectory import Reward, Segment, Status, Trajectory


class Row(NamedTuple):
    """One event as the table holds it. Token ids are int32 and logprobs float32, in the machine's order."""

    kind: str
    data: bytes
    """JSON."""
    token_ids: bytes | None = None
    logprobs: bytes | None = None
    state: bytes | None = None
    blob: str | None = None
    """SHA-256 of a file of the blob store that this event needs."""


Cells = tuple[str, bytes, bytes | None, bytes | None, bytes | None, str | None]
"""A row's, as they are written: a plain tuple is made in half the time."""
_NO_BYTES = (None, None, None, None)


class StopReason(StrEnum):
    """Why an episode ended, where nothing failed."""

    TERMINATED = "terminated"
    """The environment said so."""
    ENVIRONMENT = "environment"
    """The environment truncated it."""
    UNCLOSED_TURN = "unclosed_turn"
    """The sampled turn has no bridge to the next one."""
    TURNS = "turns"
    TURN_TOKENS = "turn_tokens"
    EPISODE_TOKENS = "episode_tokens"
    CONTEXT_TOKENS = "context_tokens"
    TOOL_CALLS = "tool_calls"
    WALL = "wall"


@dataclass(slots=True)
class CallRecord:
    """One tool call: begun, and perhaps ended."""

    ended: bool = False
    result: Any = None


@dataclass(slots=True)
class Episode:
    """Where an episode stands: its trajectory and what is needed to go on with it."""

    trajectory: Trajectory
    tools: list[dict[str, Any]] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """The same tokens as the trajectory's: what the next request is prompted with. A list takes nine times as much."""
    turn: int = -1
    """Steps that the environment has answered; -1 before the reset."""
    turn_start: int = 0
    """Where in `token_ids` the current turn begins."""
    sampled: int = 0
    """Sampled tokens in all."""
    action: Message | None = None
    """Parsed and not yet answered by the environment."""
    redacted: bool = False
    """`action` lacks its secret values."""
    tool_calls: int = 0
    """Calls handed to the environment, malformed ones left out."""
    seconds: float = 0.0
    """Time spent generating and stepping, over all lives."""
    state: State | None = None
    history: list[tuple[Message | None, list[Message]]] = field(default_factory=list)
    """(action, observation) per step, the reset first: what a replay repeats and compares."""
    calls: dict[str, CallRecord] = field(default_factory=dict)
    """Of the step that is not answered yet."""

    @property
    def turn_tokens(self) -> int:
        """Sampled tokens of the current turn."""
        return len(self.token_ids) - self.turn_start

    @property
    def needs_env(self) -> bool:
        """Whether going on takes an environment that is where this episode stands."""
        unscored = self.trajectory.stop_reason == StopReason.UNCLOSED_TURN
        return self.turn >= 0 and (self.trajectory.status is Status.PARTIAL or unscored)

    def keep(self, state: State | Same | None) -> None:
        if not isinstance(state, Same):
            self.state = state


class Event(Protocol):
    kind: ClassVar[str]

    def apply(self, episode: Episode) -> None: ...

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        """The row, and the blobs (digest -> content) that must be on disk before it."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A slot starts to run. The task is in the row of the group."""

    kind: ClassVar[str] = "begun"
    seed: int
    spec: str
    attempt: int
    life: int

    def apply(self, episode: Episode) -> None:
        pass

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        return (self.kind, orjson.dumps([self.seed, self.spec, self.attempt, self.life]), *_NO_BYTES), NO_BLOBS

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> Begun:
        seed, spec, attempt, life = orjson.loads(row.data)
        return cls(seed, spec, attempt, life)


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment answered, and its answer is rendered."""

    kind: ClassVar[str] = "observed"
    step: int
    """0 is the reset."""
    messages: list[Message]
    tail: Sequence[int] | None
    """Token ids after the turn: closing, messages, next generation prompt. None: the turn cannot be bridged."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    """With the reset: the schemas that the chat template gets."""
    state: State | Same | None = None
    seconds: float = 0.0

    def apply(self, episode: Episode) -> None:
        trajectory = episode.trajectory
        episode.history.append((episode.action, self.messages))
        episode.turn, episode.action = self.step, None
        episode.calls.clear()
        trajectory.messages.extend(self.messages)
        if self.tools is not None:
            episode.tools = self.tools
        if self.tail is not None:
            episode.token_ids.extend(self.tail)
            trajectory.append(Segment(self.tail, turn=self.step))
        episode.turn_start = len(episode.token_ids)
        if self.step and (self.reward or self.components):
            trajectory.rewards.append(Reward(self.step - 1, self.reward, self.components))
        trajectory.metrics.update(self.metrics)
        episode.seconds += self.seconds
        episode.keep(self.state)
        if self.terminated:
            trajectory.status, trajectory.stop_reason = Status.TERMINATED, StopReason.TERMINATED
        elif self.truncated:
            trajectory.status, trajectory.stop_reason = Status.TRUNCATED, StopReason.ENVIRONMENT
        elif self.tail is None:
            trajectory.status, trajectory.stop_reason = Status.TRUNCATED, StopReason.UNCLOSED_TURN

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        data: dict[str, Any] = {"step": self.step, "messages": self.messages, "seconds": self.seconds}
        if self.reward:
            data["reward"] = self.reward
        if self.terminated or self.truncated:
            data |= {"terminated": self.terminated, "truncated": self.truncated}
        if self.components or self.metrics:
            data |= {"components": self.components, "metrics": self.metrics}
        if self.tools is not None:
            data["tools"] = self.tools
        inline, blob, blobs = put_state(self.state, data)
        tail = None if self.tail is None else array("i", self.tail).tobytes()
        return (self.kind, orjson.dumps(data), tail, None, inline, blob), blobs

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> Observed:
        data = dict(orjson.loads(row.data))
        tail = None if row.token_ids is None else array("i", row.token_ids)
        state = get_state(data.pop("state", None), row.state, row.blob, load)
        return cls(tail=tail, state=state, **data)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request of the engine brought tokens."""

    kind: ClassVar[str] = "sampled"
    turn: int
    offset: int
    """Absolute position of the first token."""
    segments: Sequence[Segment]
    request_id: str
    finish: str | None
    """"stop" or the name of a limit where the turn is over; None where it goes on."""
    seconds: float = 0.0
    action: Message | None = None
    """With "stop": the finished turn as the environment gets it; parsed again only for secrets, which are not
    written."""
    shown: Message | None = None
    """The same without the secret values, where there are any: what is written down."""

    def apply(self, episode: Episode) -> None:
        for segment in self.segments:
            episode.trajectory.append(segment)
            episode.token_ids.frombytes(segment.token_ids.tobytes())
            episode.sampled += len(segment)
        episode.seconds += self.seconds
        if self.action is not None:
            episode.action, episode.redacted = self.action, self.action is self.shown
            episode.trajectory.messages.append(self.shown or self.action)
            episode.tool_calls += sum("error" not in call for call in self.action.get("tool_calls", ()))

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        parts = self.segments
        spans = [[part.author, part.weight_version, len(part.token_ids)] for part in parts]
        data: list[Any] = [self.turn, self.offset, spans, self.request_id, self.finish, self.seconds]
        if self.action is not None:
            data.append(self.action if self.shown is None else {"redacted": self.shown})
        token_ids = b"".join([part.token_ids.tobytes() for part in parts])
        logprobs = b"".join([float32_bytes(part.logprobs) for part in parts])
        blob, blobs = put_extras(parts)
        return (self.kind, orjson.dumps(data), token_ids, logprobs, None, blob), blobs

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> Sampled:
        turn, offset, spans, request_id, finish, seconds, *rest = orjson.loads(row.data)
        action = rest[0] if rest else None
        shown = None if action is None else dict(action).get("redacted")
        token_ids = np.frombuffer(row.token_ids or b"", np.int32)
        logprobs = np.frombuffer(row.logprobs or b"", np.float32)
        if not len(token_ids) == len(logprobs) == sum(length for _, _, length in spans):
            raise ValueError(f"{len(token_ids)} token ids, {len(logprobs)} logprobs, spans {spans}")
        extras = get_extras(load(row.blob), len(spans)) if row.blob else [{}] * len(spans)
        segments, start = [], 0
        for (author, version, length), extra in zip(spans, extras, strict=True):
            place = slice(start, start + length)
            segments.append(Segment(token_ids[place], author, logprobs[place], version, turn, extra))
            start += length
        return cls(turn, offset, segments, request_id, finish, seconds, shown or action, shown)

    @staticmethod
    def goes_on(data: bytes) -> bool:
        """Whether the turn of a row with this `data` is not over."""
        return orjson.loads(data)[4] is None


@dataclass(frozen=True, slots=True)
class Spent:
    """Own time that no other event accounts for, as of a tool that was cut; and the limit that ends the episode, before
    it is scored."""

    kind: ClassVar[str] = "spent"
    seconds: float
    limit: str | None = None

    def apply(self, episode: Episode) -> None:
        episode.seconds += self.seconds
        if self.limit is not None:
            episode.trajectory.stop_reason = self.limit

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        return (self.kind, orjson.dumps([self.seconds, self.limit]), *_NO_BYTES), NO_BLOBS

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> Spent:
        return cls(*orjson.loads(row.data))


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is about to run; on disk before it does."""

    kind: ClassVar[str] = "call_begun"
    call_id: str
    name: str
    arguments: Mapping[str, Any]
    idempotent: bool = False
    """It may be begun again."""

    def apply(self, episode: Episode) -> None:
        episode.calls[self.call_id] = CallRecord()

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        fields = [self.call_id, self.name, self.arguments, self.idempotent]
        data = orjson.dumps(fields, default=repr, option=orjson.OPT_NON_STR_KEYS)
        return (self.kind, data, *_NO_BYTES), NO_BLOBS

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> CallBegun:
        return cls(*orjson.loads(row.data))


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A tool returned, and the environment's state after it."""

    kind: ClassVar[str] = "call_ended"
    call_id: str
    result: Any
    state: State | Same | None = SAME

    def apply(self, episode: Episode) -> None:
        episode.calls[self.call_id] = CallRecord(True, self.result)
        episode.keep(self.state)

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        data: dict[str, Any] = {"call_id": self.call_id, "result": self.result}
        inline, blob, blobs = put_state(self.state, data)
        return (self.kind, orjson.dumps(data), None, None, inline, blob), blobs

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> CallEnded:
        data = dict(orjson.loads(row.data))
        return cls(state=get_state(data.pop("state", None), row.state, row.blob, load), **data)


@dataclass(frozen=True, slots=True)
class Ended:
    """The episode is over. `score` is what `afinish` gave where a limit of the runner ended it."""

    kind: ClassVar[str] = "ended"
    status: Status
    stop_reason: str
    score: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    traceback: str | None = None

    def apply(self, episode: Episode) -> None:
        trajectory = episode.trajectory
        trajectory.status, trajectory.stop_reason = self.status, self.stop_reason
        if self.score is not None:
            trajectory.rewards.append(Reward(None, self.score, self.components))
        trajectory.metrics.update(self.metrics)

    def encode(self) -> tuple[Cells, Mapping[str, bytes]]:
        names = ("status", "stop_reason", "score", "components", "metrics", "traceback")
        data = {name: getattr(self, name) for name in names}
        return (self.kind, orjson.dumps(data), *_NO_BYTES), NO_BLOBS

    @classmethod
    def decode(cls, row: Row, load: LoadBlob) -> Ended:
        data = dict(orjson.loads(row.data))
        return cls(Status(data.pop("status")), **data)


_KINDS: dict[str, Any] = {event.kind: event for event in (Begun, Observed, Sampled, Spent, CallBegun, CallEnded, Ended)}


def decode(row: Row, load: LoadBlob) -> Event:
    """Raises ValueError (or KeyError, TypeError) where the row is damaged."""
    event: Event = _KINDS[row.kind].decode(row, load)
    return event


def fold(trajectory: Trajectory, events: Iterable[Event]) -> Episode:
    """The episode that these events add up to. Raises JournalError where they are damaged, and do not."""
    episode = Episode(trajectory)
    with boundary(JournalError, f"the events of episode {trajectory.id} are damaged: they do not go together"):
        for event in events:
            event.apply(episode)
    return episode
