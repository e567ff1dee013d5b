"""live.json: what a running process says about itself, for whoever cannot open its journal, or asks for more.

Made from memory, by another thread than the event loop's; a record is a copy, so nothing in it changes any more.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from gspo_agent.rollout.groups import Slot
from gspo_agent.rollout.owner import Owner
from gspo_agent.rollout.status import InFlight, RunStatus, lags
from gspo_agent.rollout.watchdog import Stillness
from gspo_agent.trajectory import version_step

if TYPE_CHECKING:
    from gspo_agent.rollout.recorder import JournalRecorder

NAME = "live.json"
_LABELS = {
    "": "the environment",
    "reset": "the reset",
    "quota": "a quota",
    "journal": "the journal",
    "judges": "the judge",
}


class Rollouts(NamedTuple):
    """A collector from the inside, as of now; every sequence is a copy."""

    active: Sequence[JournalRecorder]
    """Of the episodes that are being played."""
    places: Sequence[Slot]
    """They wait for a place among `max_in_flight`."""
    again: Sequence[Slot]
    """They wait until they may be tried again."""
    paused: bool
    """No token is being sampled."""
    leasing: float | None
    """Since when the learner waits for groups, by `time.monotonic`; None: it does not."""
    ready: int
    wanted: int
    """Groups that are finished, and how many a step takes."""
    flat: int
    """So many of the last groups that finished had equal rewards, without another between them."""
    failed: int
    """So many of the last attempts failed, without another between them."""
    cause: str
    """Of the last one that failed."""
    failures: Mapping[str, int]
    """Cause -> episodes of this life."""
    restarts: int
    tokens: int
    """Sampled in this life."""


class Loss(NamedTuple):
    """What a `kill -9` takes; a stop by Ctrl-C or SIGTERM writes everything down first."""

    requests: int = 0
    """Running ones."""
    sampled: int = 0
    """Tokens that they have sampled so far."""
    at_most: int = 0
    """Tokens that they may have sampled before they are written down."""


@dataclass(frozen=True, slots=True)
class Live:
    """One look of a process at itself."""

    owner: Owner
    """`seen` is the moment of the look."""
    journal: str
    """Where the journal is, as this process has it."""
    inode: tuple[int, int]
    """Device and inode of the journal: another one is a copy."""
    phase: str
    phase_seconds: float
    in_flight: tuple[InFlight, ...]
    loss: Loss
    staleness: Mapping[int, int]
    """Of what is in flight: lag in steps -> sampled tokens, as if the next step took it."""
    failures: Mapping[str, int]
    """Cause -> episodes of this life."""
    restarts: int
    tokens: int
    """Sampled in this life."""
    still: tuple[Stillness, ...]
    remarks: tuple[str, ...]
    ledger: RunStatus | None
    """What the journal had at `ledger_at`, in seconds since the epoch."""
    ledger_at: float


_LIVE = TypeAdapter(Live)


def read_live(directory: Path) -> Live | None:
    """The newest record of a run directory; None where there is none that can be read."""
    try:
        return _LIVE.validate_json((directory / NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def write_live(directory: Path, live: Live) -> None:
    """Takes the place of the record before, whole or not at all. Raises OSError, and leaves nothing behind."""
    data = orjson.dumps(live, default=tuple, option=orjson.OPT_NON_STR_KEYS)
    temporary = directory / f"{NAME}.tmp"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, directory / NAME)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def waiting_for(recorder: JournalRecorder, paused: bool) -> str:
    """What an episode that is being played waits for, as `InFlight` has it; `paused`: no token is being sampled."""
    if recorder.stage == "tokens":
        return "the learner" if paused else "tokens"
    if recorder.stage != "tools":
        return _LABELS[recorder.stage]
    episode = recorder.episode
    place = f"{episode.trajectory.id}/{episode.turn}"
    calls = () if episode.action is None else episode.action.get("tool_calls", ())
    names = []
    for position, call in enumerate(calls):
        record = episode.calls.get(f"{place}/{position}")
        if record is not None and not record.ended:
            function: Mapping[str, Any] = call.get("function") or {}
            names.append(str(function.get("name")))
    return f"tool {' and '.join(names)}" if names else "the step"


def all_in_flight(rollouts: Rollouts, sampled: Mapping[str, int], now: float) -> tuple[InFlight, ...]:
    """Those that are played, in the order of `active`, and behind them the others.

    `sampled`: request id -> tokens so far. `now`: by `time.monotonic`.
    """
    paused, episodes = rollouts.paused, []
    for recorder in rollouts.active:
        episode = recorder.episode
        tokens = recorder.unjournaled
        if recorder.request_id:
            tokens += sampled.get(recorder.request_id, 0)
        since = round(max(0.0, now - recorder.since), 1)
        what = waiting_for(recorder, paused)
        episodes.append(InFlight(episode.trajectory.id, what, max(0, episode.turn), since, tokens))
    for what, slots in (("a place", rollouts.places), ("another attempt", rollouts.again)):
        episodes += [InFlight(f"{slot.group_id}.{slot.number}.{slot.attempt}", what, 0, 0.0) for slot in slots]
    return tuple(episodes)


def staleness(rollouts: Rollouts, step: int) -> dict[int, int]:
    """Of everything that was sampled and is in flight, as if `step` took it."""
    tokens: Counter[int | None] = Counter()
    for recorder in rollouts.active:
        for segment in recorder.episode.trajectory.segments:
            tokens[segment.weight_version] += len(segment.token_ids)
    del tokens[None]  # what the environments wrote
    return lags(((version_step(version), number) for version, number in tokens.items() if version is not None), step)
