"""One attempt at a slot: from where the journal has it to its end, or to where it is cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gspo_agent.clock import Clock
from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.engine.base import Engine
from gspo_agent.env import Env, EnvFactory
from gspo_agent.errors import ConfigError, JournalError, StateLost, cause_of, is_fault
from gspo_agent.rollout.episode import run_episode
from gspo_agent.rollout.events import Begun, Ended
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger, OpenGroup, Settled, Slot
from gspo_agent.rollout.prompts import SharedPrompts
from gspo_agent.rollout.recall import Recall
from gspo_agent.rollout.recorder import JournalRecorder
from gspo_agent.rollout.restore import rebuild
from gspo_agent.trajectory import Status, Trajectory

if TYPE_CHECKING:
    # At run time it would bring transformers along.
    from gspo_agent.chat import Chat
    from gspo_agent.tasks import TaskSource

_log = logging.getLogger(__name__)
_CLOSE_SECONDS, _LAST_CLOSE_SECONDS = 30.0, 0.3


@dataclass(frozen=True, slots=True)
class Source:
    """One environment with its tasks."""

    factory: EnvFactory
    tasks: TaskSource
    limits: Limits
    weight: float = 1.0
    """Share of the groups, relative to the other sources."""


class Outcome(NamedTuple):
    """How an attempt ended."""

    settled: Settled
    trajectory: Trajectory | None
    """None where it could not be gone on with, and begins again."""

    @property
    def failed(self) -> bool:
        return self.trajectory is not None and self.trajectory.status is Status.FAILED


class Attempts:
    """Plays slots; has those that are being played in `active`."""

    def __init__(
        self, journal: Journal, ledger: Ledger, chat: Chat, engine: Engine, config: RolloutConfig, clock: Clock
    ) -> None:
        self._journal, self._ledger, self._chat = journal, ledger, SharedPrompts(chat)
        self._engine, self._config, self._clock = engine, config, clock
        self._recall = Recall(journal)
        self.active: dict[int, JournalRecorder] = {}
        """Slot id -> its recorder."""
        self.leaving = False
        """Nothing begins, and environments get no more than a moment to close."""
        self.restarts = 0
        """Episodes that could not be gone on with and began again."""
        self._tokens = 0
        self._without_state: set[str] = set()

    @property
    def tokens(self) -> int:
        """Sampled in this life."""
        return self._tokens + sum(recorder.sampled_now for recorder in tuple(self.active.values()))

    async def play(self, source: Source, group: OpenGroup, slot: Slot, ended: Callable[[Outcome], None]) -> None:
        """Returns when the attempt is over, or cut, and its environment is closed.

        What came of it is told to `ended` before that, at once and in the order in which the ledger has it. Raises
        JournalError and ConfigError; every other fault ends the attempt as failed.
        """
        if self.leaving:
            return
        recorder = await self._recorder(group, slot)
        recorder.cut, episode = self.leaving, recorder.episode
        recorder.on_settled = lambda settled: ended(Outcome(settled, episode.trajectory))
        self.active[slot.id] = recorder
        env: Env | None = None
        try:
            env = source.factory.create()
            if episode.needs_env:
                recorder.introduce(env, dict(group.task))
                await rebuild(env, episode)
            await run_episode(
                episode.trajectory,
                env=env,
                chat=self._chat,
                engine=self._engine,
                task=group.task,
                limits=source.limits,
                temperature=self._config.temperature,
                recorder=recorder,
                journal_tokens=self._config.journal_tokens,
                renew=source.factory.create,
                clock=self._clock,
            )
        except StateLost as lost:
            recorder.lost = True
            self.restarts += 1
            ended(Outcome(await asyncio.wrap_future(self._ledger.restart(slot, str(lost))), None))
        except (JournalError, ConfigError):
            raise
        except BaseException as fault:
            if not is_fault(fault):
                raise
            recorder.record(Ended(Status.FAILED, cause_of(fault)))  # it could not be made or brought back
        finally:
            self._warn_of_lost_state(recorder)
            await self._close(env, recorder)
            self._tokens += recorder.sampled_now
            del self.active[slot.id]
        if recorder.settled is not None:
            await recorder.settled

    async def _recorder(self, group: OpenGroup, slot: Slot) -> JournalRecorder:
        if slot.running:
            return JournalRecorder(self._journal, self._ledger, slot, await self._recall.episode(slot))
        recorder = JournalRecorder(self._journal, self._ledger, slot)
        recorder.record(Begun(slot.seed, group.spec, slot.attempt, self._journal.life))
        return recorder

    def _warn_of_lost_state(self, recorder: JournalRecorder) -> None:
        problem = recorder.state_problem
        if problem is not None and problem not in self._without_state:
            self._without_state.add(problem)
            _log.warning("episodes start again after a crash: %s", problem)

    async def _close(self, env: Env | None, recorder: JournalRecorder) -> None:
        """Lets go of the instance; where the episode was cut, what its state leads to stays."""
        if env is None:
            return
        recorder.enter("")
        over = recorder.settled is not None or recorder.lost or recorder.episode.turn < 0
        try:
            async with asyncio.timeout(_LAST_CLOSE_SECONDS if self.leaving else _CLOSE_SECONDS):
                await (env.aclose() if over else env.adetach())
        except BaseException as error:  # the episode is over; its result does not hang on this
            if not is_fault(error) and not isinstance(error, asyncio.CancelledError):
                raise
            _log.warning("%s.close: %s: %s", type(env).__name__, type(error).__name__, error)
