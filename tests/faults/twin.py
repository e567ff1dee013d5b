"""Twin: the same episode played without any fault, in memory; and how far a journaled one is from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_agent.config import Limits
from gspo_agent.engine.base import Engine
from gspo_agent.env import CallLog, CallMeta, Env
from gspo_agent.messages import user
from gspo_agent.rollout.episode import run_episode
from gspo_agent.rollout.events import CallRecord, Episode
from gspo_agent.rollout.recorder import INTERRUPTED, Recorder
from gspo_agent.trajectory import Trajectory
from tests.faults.world import WORLDS

_SAME_LOGPROB = 1e-3


@dataclass(frozen=True, slots=True)
class Distance:
    same: bool
    tie: bool
    """Only the ids of sampled tokens differ, after a common beginning: what rounding may do to a local engine."""


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
    known = {id: record for id, record in episode.calls.items() if id in met}
    if not env.logs_calls:
        known = {id: record for id, record in known.items() if _interrupted(episode, id)}
    recorder = _Recorder(twin, known)
    return await run_episode(twin, env=env, chat=chat, engine=engine, task=dict(task), limits=limits, recorder=recorder)


def _interrupted(episode: Episode, step_id: str) -> bool:
    """Whether a plain step was answered for by the runner."""
    turn = int(step_id.split("/")[1])
    return episode.history[turn + 1][1] == [user(INTERRUPTED)]


def compare(journaled: Trajectory, twin: Trajectory) -> Distance:
    ours, theirs = _view(journaled), _view(twin)
    if ours[1:] == theirs[1:] and _rows_agree(ours[0], theirs[0], exact=True):
        return Distance(True, False)
    return Distance(False, _rows_agree(ours[0], theirs[0], exact=False))


def _view(trajectory: Trajectory) -> Any:
    rows = [(row.token_ids, row.sampled, row.rollout_logprobs) for row in trajectory.rows()]
    rewards = [(reward.turn, reward.value, dict(reward.components)) for reward in trajectory.rewards]
    return rows, rewards, trajectory.messages, trajectory.status, trajectory.stop_reason, trajectory.seed


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
    def __init__(self, trajectory: Trajectory, known: Mapping[str, CallRecord]) -> None:
        super().__init__(trajectory)
        self._known = known
        # A plain step that was interrupted is not done again.
        self.episode.calls.update({id: CallRecord() for id in known})

    def call_log(self, env: Env) -> CallLog:
        return _Log(self._known)


class _Log(CallLog):
    def __init__(self, known: Mapping[str, CallRecord]) -> None:
        self._known = known

    async def run(self, call_id: str, function: Callable[[], Awaitable[Any]], meta: CallMeta) -> Any:
        record = self._known.get(call_id)
        if record is not None and record.ended and record.result.get("outcome") in ("interrupted", "timeout"):
            return record.result
        return await function()
