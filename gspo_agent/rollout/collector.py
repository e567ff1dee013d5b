"""Collector: many episodes at once, handed out in groups; what is unfinished is kept and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_agent import errors
from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.engine.base import Engine
from gspo_agent.env import Env, EnvFactory
from gspo_agent.errors import EnvError, GspoAgentError, JournalError, StateLost
from gspo_agent.rollout.episode import run_episode
from gspo_agent.rollout.events import Begun, Ended, fold
from gspo_agent.rollout.journal import Journal, read_events
from gspo_agent.rollout.ledger import Lease, Ledger, NewGroup, OpenGroup, Ready, Settled, Slot, choose
from gspo_agent.rollout.prompts import SharedPrompts
from gspo_agent.rollout.recorder import JournalRecorder
from gspo_agent.rollout.restore import rebuild
from gspo_agent.trajectory import Status, Trajectory

if TYPE_CHECKING:
    # At run time it would bring transformers along.
    from gspo_agent.chat import Chat
    from gspo_agent.tasks import TaskSource

_log = logging.getLogger(__name__)
_WINDOW = 200  # episodes over which the share of failures is taken
_FIRST_BACK_OFF, _LONGEST_BACK_OFF = 0.5, 30.0  # seconds
_CLOSE_SECONDS, _LAST_CLOSE_SECONDS = 30.0, 0.3
_ABORT_SECONDS, _CUT_SECONDS = 0.3, 0.7  # within the two seconds that `stop` may take


@dataclass(frozen=True, slots=True)
class Source:
    """One environment with its tasks."""

    factory: EnvFactory
    tasks: TaskSource
    limits: Limits
    weight: float = 1.0
    """Share of the groups, relative to the other sources."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is going on right now; `str()` is one line for a screen."""

    in_flight: int
    generating: int
    in_tools: int
    ready_groups: int
    """Finished and not handed out."""
    open_groups: int
    failures: dict[str, int]
    """Cause -> episodes of this life."""
    restarts: int
    """Episodes that could not be gone on with and began again."""
    tokens: int
    """Sampled in this life."""

    def __str__(self) -> str:
        text = (
            f"{self.in_flight} episodes in flight ({self.generating} generating, {self.in_tools} in tools), "
            f"{self.ready_groups} groups ready, {self.tokens} tokens"
        )
        if self.failures:
            cause, number = max(self.failures.items(), key=lambda item: item[1])
            text += f", {sum(self.failures.values())} failed ({number} times {cause})"
        return text


class Collector:
    """Keeps enough groups in flight, and leases finished ones to the learner.

    A keeper task creates groups: it waits for a group to finish or to be leased, and tops up. One task per slot plays
    its attempts. `lease` waits until enough groups are ready, is woken by every group that finishes, and takes nothing
    from those that are in flight: they go on, under whatever weights come next.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        ledger: Ledger,
        sources: Sequence[Source],
        chat: Chat,
        engine: Engine,
        config: RolloutConfig,
        seed: int,
    ) -> None:
        self._journal, self._ledger, self._sources = journal, ledger, list(sources)
        self._chat, self._engine, self._config, self._seed = SharedPrompts(chat), engine, config, seed
        self._tasks: set[asyncio.Task[None]] = set()
        self._active: dict[int, JournalRecorder] = {}
        self._open: set[int] = set()
        self._ready: list[Ready] = []
        self._finished: dict[int, list[Trajectory]] = {}
        """Group id -> members that ended in this life, until the group is handed out."""
        self._cursors: dict[int, int] = {}
        self._demand = config.groups_per_step
        self._topping_up, self._changed = asyncio.Event(), asyncio.Event()
        self._failures: Counter[str] = Counter()
        self._recent: deque[str | None] = deque(maxlen=_WINDOW)
        self._restarts = 0
        self._without_state: set[str] = set()
        self._tokens = 0
        self._fatal: BaseException | None = None
        self._stopping = True

    async def start(self, step: int) -> None:
        """Goes on with every unfinished episode of the journal and begins what is missing; `step` is the last one."""
        if not self._stopping:
            raise RuntimeError("the collector runs already")
        self._stopping, self._fatal = False, None
        self._ready = self._ledger.ready()
        self._cursors = self._ledger.cursors()
        unfinished = self._ledger.unfinished()
        unknown = {group.source for group in unfinished} - set(range(len(self._sources)))
        if unknown:
            raise JournalError(
                f"{self._journal.path} has groups of [[env]] {min(unknown)}; there is no such section now"
            )
        for group in unfinished:
            self._spawn(group)
        self._topping_up.set()
        self._keep(self._top_up())

    async def lease(self, num_groups: int, *, step: int) -> Lease:
        """The groups of a training step: the recorded ones, or the first `num_groups` that finished.

        Waits for enough of them. Groups without variance are left out, up to `max_filtered` for a step. Raises
        JournalError, or the fault behind most failures once their share passes `max_failed`.
        """
        recorded = step in self._ledger.pending_leases()
        self._demand = max(self._demand, num_groups)
        self._topping_up.set()
        while not recorded and choose(self._ready, num_groups, self._max_filtered) is None:
            self._check()
            self._changed.clear()
            await self._changed.wait()
        self._check()
        lease = await self._ledger.lease(
            step,
            num_groups,
            max_filtered=self._max_filtered,
            max_weight_lag=self._config.max_weight_lag,
            finished=self._finished,
        )
        if lease is None:
            raise JournalError(f"{self._journal.path}: step {step} found fewer groups ready than the collector counts")
        taken = {group.id for group in (*lease.groups, *lease.filtered)}
        self._ready = [group for group in self._ready if group.id not in taken]
        self._finished = {group: ended for group, ended in self._finished.items() if group not in taken}
        self._topping_up.set()
        return lease

    async def stop(self) -> None:
        """Cuts every episode where it is; returns within two seconds with everything on disk. May be called twice."""
        self._stopping = True
        for recorder in self._active.values():
            recorder.cut = True
        requests = [recorder.request_id for recorder in self._active.values() if recorder.request_id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await asyncio.gather(*map(self._engine.abort, requests), return_exceptions=True)
        self._topping_up.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CUT_SECONDS)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._journal.transact(lambda connection: None)

    def progress(self) -> Progress:
        active = self._active.values()
        return Progress(
            in_flight=len(active),
            generating=sum(bool(recorder.request_id) for recorder in active),
            in_tools=sum(recorder.episode.action is not None for recorder in active),
            ready_groups=len(self._ready),
            open_groups=len(self._open),
            failures=dict(self._failures),
            restarts=self._restarts,
            tokens=self._tokens + sum(recorder.sampled_now for recorder in active),
        )

    @property
    def _max_filtered(self) -> int:
        config = self._config
        return int(config.max_filtered * config.groups_per_step) if config.filter_zero_variance else 0

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._stopping:
            raise RuntimeError("the collector is not running")

    def _keep(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._fatal is None:
            self._fatal = task.exception()
        self._changed.set()

    async def _top_up(self) -> None:
        while not self._stopping:
            await self._topping_up.wait()
            self._topping_up.clear()
            while not self._stopping and self._missing() > 0:
                self._spawn(await self._create())

    def _missing(self) -> int:
        """Groups to create: those in flight, and those ready that will not be filtered, count."""
        flat = sum(group.flat for group in self._ready)
        useful = len(self._ready) - min(flat, self._max_filtered)
        return math.ceil(self._demand * self._config.over_provision) - useful - len(self._open)

    async def _create(self) -> OpenGroup:
        # The source that is furthest behind its share; the cursors are in the journal, so a restart decides alike.
        number = min(range(len(self._sources)), key=lambda n: (self._cursors.get(n, 0) + 1) / self._sources[n].weight)
        source, cursor, config = self._sources[number], self._cursors.get(number, 0), self._config
        group = await self._ledger.create_group(
            NewGroup(
                number, cursor, source.factory.config.id, source.tasks.task(cursor), config.group_size,
                config.max_attempts, config.min_group, self._seed,
            )
        )  # fmt: skip
        self._cursors[number] = cursor + 1
        return group

    def _spawn(self, group: OpenGroup) -> None:
        self._open.add(group.id)
        for slot in group.slots:
            self._keep(self._play_slot(group, slot))

    async def _play_slot(self, group: OpenGroup, slot: Slot) -> None:
        """Plays one member of a group, attempt after attempt."""
        following: Slot | None = slot
        while following is not None and not self._stopping:
            if following.attempt > slot.attempt:
                await self._back_off(following.attempt - slot.attempt)
                if self._stopping:
                    return
            settled = await self._attempt(group, following)
            if settled is None:
                return
            if settled.group_state != "open":
                self._open.discard(group.id)
                if settled.ready is not None:
                    self._ready.append(settled.ready)
                else:
                    self._finished.pop(group.id, None)
                self._topping_up.set()
                self._changed.set()
            following = settled.retry

    async def _back_off(self, times: int) -> None:
        await asyncio.sleep(min(_FIRST_BACK_OFF * 2 ** (times - 1), _LONGEST_BACK_OFF))

    async def _attempt(self, group: OpenGroup, slot: Slot) -> Settled | None:
        """One attempt, from where the journal has it to its end; None where it was cut."""
        source = self._sources[group.source]
        recorder = await self._recorder(group, slot)
        episode = recorder.episode
        self._active[slot.id] = recorder
        env: Env | None = None
        try:
            env = source.factory.create()
            if episode.needs_env:
                env.call_log = recorder.call_log(env)
                await rebuild(env, episode, dict(group.task))
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
            )
        except StateLost as lost:
            self._restarts += 1
            return await asyncio.wrap_future(self._ledger.restart(slot, str(lost)))
        except JournalError:
            raise
        except Exception as fault:  # the environment could not be made or brought back
            recorder.record(Ended(Status.FAILED, f"{type(fault).__name__}: {fault}"))
        finally:
            self._warn_of_lost_state(recorder)
            await self._close(env)
            self._tokens += recorder.sampled_now
            del self._active[slot.id]
        if recorder.settled is None:
            return None
        self._finished.setdefault(group.id, []).append(episode.trajectory)
        settled = await asyncio.wrap_future(recorder.settled)
        self._count(recorder)
        return settled

    async def _recorder(self, group: OpenGroup, slot: Slot) -> JournalRecorder:
        if slot.running:
            blobs = self._journal.blobs
            events = await self._journal.transact(lambda c: read_events(c, slot.id, blobs))
            return JournalRecorder(self._journal, self._ledger, slot, fold(slot.trajectory(), events))
        recorder = JournalRecorder(self._journal, self._ledger, slot)
        recorder.record(Begun(slot.seed, group.spec, slot.attempt, self._journal.life))
        return recorder

    def _warn_of_lost_state(self, recorder: JournalRecorder) -> None:
        problem = recorder.state_problem
        if problem is not None and problem not in self._without_state:
            self._without_state.add(problem)
            _log.warning("episodes start again after a crash: %s", problem)

    async def _close(self, env: Env | None) -> None:
        if env is None:
            return
        try:
            async with asyncio.timeout(_LAST_CLOSE_SECONDS if self._stopping else _CLOSE_SECONDS):
                await env.aclose()
        except (Exception, asyncio.CancelledError) as error:  # the episode is over; its result does not hang on this
            _log.warning("%s.close: %s: %s", type(env).__name__, type(error).__name__, error)

    def _count(self, recorder: JournalRecorder) -> None:
        """Counts one ended episode; past the limit on failures the run stops with the cause of most."""
        trajectory = recorder.episode.trajectory
        failed = trajectory.status is Status.FAILED
        self._recent.append(trajectory.stop_reason if failed else None)
        if not failed:
            return
        self._failures[str(trajectory.stop_reason)] += 1
        causes = [cause for cause in self._recent if cause is not None]
        if len(causes) > self._config.max_failed * _WINDOW and self._fatal is None:
            kind = getattr(errors, causes[0].partition(":")[0], EnvError)
            kind = kind if isinstance(kind, type) and issubclass(kind, GspoAgentError) else EnvError
            self._fatal = (kind if kind is not errors.ReplayError else EnvError)(
                f"{len(causes)} of the last {len(self._recent)} episodes failed, more than rollout.max_failed = "
                f"{self._config.max_failed:g} allows; the first cause: {causes[0]}"
            )
            self._changed.set()
