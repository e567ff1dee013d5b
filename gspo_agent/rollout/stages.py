"""What the watchdog looks at: the stages of a run, and the ways in which one that looks alive gets nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gspo_agent.rollout.live import Rollouts
from gspo_agent.rollout.status import InFlight
from gspo_agent.rollout.watchdog import Remark, Work

_IDLE = ("starting", "done", "waiting for groups")
_OWN = ("tokens", "judges", "quota", "journal")
"""What an episode waits for that is no tool and nothing else of its environment."""
_LEARNING = ("learning", "saving")
_FAILED_IN_A_ROW = 8  # attempts


class Phase(NamedTuple):
    """What the run as a whole is doing."""

    text: str
    since: float
    """By `time.monotonic`."""
    done: int = 0
    """Changes whenever a part of it is done."""


class Waiting(NamedTuple):
    """An episode that is being played, and the stage that works on it."""

    stage: str
    since: float
    """By `time.monotonic`."""
    episode: InFlight


def learner_stage(phase: Phase) -> Work:
    """What the run itself works on; phases that are not of the learner by their own names."""
    stage = "learner" if phase.text in _LEARNING else phase.text
    return Work(stage, frozenset() if phase.text in _IDLE else {phase.since}, phase.text, phase.done)


def at_work(rollouts: Rollouts, in_flight: Sequence[InFlight]) -> list[Waiting]:
    """What is played, without those that wait for tokens of a paused engine."""
    return [
        Waiting(recorder.stage if recorder.stage in _OWN else "tools", recorder.since, episode)
        for recorder, episode in zip(rollouts.active, in_flight, strict=False)  # behind them, those that are not played
        if not (rollouts.paused and recorder.stage == "tokens")
    ]


def episode_stages(working: Sequence[Waiting], sampled: int) -> Iterator[Work]:
    """Tokens, tools, judges and quotas; `sampled` grows with every token."""
    for name in ("tokens", "tools", "judges", "quota"):
        there = [(since, episode) for stage, since, episode in working if stage == name]
        # Whoever has begun to wait for something else has moved on.
        waiting = {(since, episode.id) for since, episode in there}
        example = named(min(there, key=lambda each: each[0])[1]) if there else ""
        yield Work(name, waiting, example, sampled if name == "tokens" else None)


def remarks(
    rollouts: Rollouts,
    in_flight: Sequence[InFlight],
    working: Sequence[Waiting],
    *,
    moves: Callable[[str], bool],
    patience: float,
    waited: float,
    usual: float,
) -> Iterator[Remark]:
    """Why nothing may reach the learner although everything moves.

    Args:
        moves: Whether a stage makes progress; who waits where nothing moves is told with the stage.
        patience: Seconds.
        waited: Seconds for which the learner has been waiting for groups.
        usual: The longest that it waited before; less than twice that is no news.
    """
    yield Remark(
        "flat", rollouts.flat, 2 * rollouts.wanted,
        f"nothing to learn: in each of the last {rollouts.flat} groups all rewards were equal",
    )  # fmt: skip
    yield Remark(
        "failed", rollouts.failed, _FAILED_IN_A_ROW,
        f"the last {rollouts.failed} attempts all failed, the last one with {rollouts.cause}",
    )  # fmt: skip
    alone = [e for stage, _, e in working if e.since >= patience and moves(stage)]
    if alone:
        longest = max(alone, key=lambda episode: episode.since)
        more = f", and {len(alone) - 1} more wait that long" if len(alone) > 1 else ""
        yield Remark(
            "episode", longest.since, patience,
            f"an episode does not come back: {named(longest)} for {longest.since:.0f} s{more}",
        )  # fmt: skip
    yield Remark("groups", waited, max(patience, 2 * usual), _missing_groups(rollouts, in_flight, waited))


def named(episode: InFlight) -> str:
    return f"{episode.id} waits for {episode.waiting_for}"


def _missing_groups(rollouts: Rollouts, in_flight: Sequence[InFlight], waited: float) -> str:
    text = f"no batch has reached the learner for {waited:.0f} s: {rollouts.ready} of {rollouts.wanted} groups ready"
    missing = Counter(episode.id.partition(".")[0] for episode in in_flight)
    if not missing:
        return text
    group, number = min(missing.items(), key=lambda item: item[1])
    last = max((e for e in in_flight if e.id.startswith(f"{group}.")), key=lambda episode: episode.since)
    return f"{text}; group {group} lacks {number}, such as {named(last)} for {last.since:.0f} s"
