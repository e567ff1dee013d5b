"""Twin: the same episode played without any fault, in memory; and how far a journaled one is from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from gspo_agent.config import Limits
from gspo_agent.engine.base import Engine
from gspo_agent.env import CallLog, CallMeta, Env
from gspo_agent.messages import Message, user
from gspo_agent.rollout.episode import run_episode
from gspo_agent.rollout.events import CallRecord, Episode, Event
from gspo_agent.rollout.recorder import INTERRUPTED, Recorder
from gspo_agent.trajectory import Trajectory
from tests.faults.world import WORLDS

_SAME_LOGPROB = 1e-3
_VIEWED = ("messages", "rewards", "status", "stop_reason", "seed")


@dataclass(frozen=True, slots=True)
class Distance:
    same: bool
    tie: bool
    """Only the ids of sampled tokens differ, after a common beginning: what rounding may do to a local engine."""
    where: str = ""
    """The first thing that differs, ours and the twin's."""


async def play(
    episode: Episode,
    world: str,
    task: Mapping[str, Any],
    engine: Engine,
    chat: Any,
    limits: Limits,
    met: Collection[str],
) -> Trajectory:
    """The episode's twin. The calls in `met` were hit by a fault; they end here as they ended there."""
    journaled = episode.trajectory
    twin = Trajectory(journaled.group_id, journaled.index, journaled.attempt, journaled.seed)
    env = WORLDS[world]()
    recorder = _Recorder(twin, {id: answer for call in met for id, answer in _without_result(episode, call)})
    return await run_episode(twin, env=env, chat=chat, engine=engine, task=dict(task), limits=limits, recorder=recorder)


def _without_result(episode: Episode, call_id: str) -> Iterator[tuple[str, Message]]:
    """The answer to a call of this episode that has no result of its own (it was interrupted, or timed out), and those
    to the calls after it that were not run for that."""
    name, turn, position = call_id.split("/")
    if name != episode.trajectory.id or int(turn) + 1 >= len(episode.history):
        return
    answers = episode.history[int(turn) + 1][1]
    if answers == [user(INTERRUPTED)]:  # a plain step
        yield call_id, answers[0]
    for place, answer in enumerate(answers[int(position) :], start=int(position)):
        met = place == int(position) and answer.get("outcome") in ("interrupted", "timeout")
        if met or answer["content"] == "Not run: a call before it timed out.":
            yield f"{name}/{turn}/{place}", answer


def compare(journaled: Trajectory, twin: Trajectory) -> Distance:
    ours, theirs = _view(journaled), _view(twin)
    if ours[1:] == theirs[1:] and _rows_agree(ours[0], theirs[0], exact=True):
        return Distance(True, False)
    pairs = zip(_VIEWED, ours[1:], theirs[1:], strict=True)
    what, one, other = next((pair for pair in pairs if pair[1] != pair[2]), ("tokens", "", ""))
    if what == "messages":
        one, other = next(pair for pair in zip_longest(one, other) if pair[0] != pair[1])
    return Distance(False, _rows_agree(ours[0], theirs[0], exact=False), f"{what} {one!r:.400} and {other!r:.400}")


def _view(trajectory: Trajectory) -> Any:
    rows = [(row.token_ids, row.sampled, row.rollout_logprobs) for row in trajectory.rows()]
    rewards = [(reward.turn, reward.value, dict(reward.components)) for reward in trajectory.rewards]
    return rows, trajectory.messages, rewards, trajectory.status, trajectory.stop_reason, trajectory.seed


def _rows_agree(ours: Any, theirs: Any, exact: bool) -> bool:
    if len(ours) != len(theirs):
        return False
    for (ids, sampled, logprobs), (other_ids, other_sampled, other_logprobs) in zip(ours, theirs, strict=True):
        length = min(len(ids), len(other_ids))
        differs = np.flatnonzero(ids[:length] != other_ids[:length])
        if exact and (len(ids) != len(other_ids) or len(differs)):
            return False
        end = int(differs[0]) if len(differs) else length
        if len(differs) and not sampled[end]:
            return False
        if not np.array_equal(sampled[:end], other_sampled[:end]):
            return False
        if not np.allclose(logprobs[:end], other_logprobs[:end], atol=_SAME_LOGPROB):
            return False
    return True


class _Recorder(Recorder):
    def __init__(self, trajectory: Trajectory, known: Mapping[str, Message]) -> None:
        super().__init__(trajectory)
        self._known = known

    def record(self, *events: Event) -> None:
        super().record(*events)
        # A plain step that was interrupted is not done again.
        self.episode.calls.update({id: CallRecord() for id in self._known})

    def call_log(self, env: Env) -> CallLog:
        return _Log(self._known)


class _Log(CallLog):
    def __init__(self, known: Mapping[str, Message]) -> None:
        self._known = known

    async def run(self, call_id: str, function: Callable[[], Awaitable[Any]], meta: CallMeta) -> Any:
        return self._known[call_id] if call_id in self._known else await function()
