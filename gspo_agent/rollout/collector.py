"""Collector: many episodes at once, handed out in groups; what is unfinished is kept and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from gspo_agent.background import off_loop
from gspo_agent.clock import Clock
from gspo_agent.config import RolloutConfig
from gspo_agent.engine.base import Engine
from gspo_agent.errors import EnvError, JournalError
from gspo_agent.rollout.attempt import Attempts, Outcome, Source
from gspo_agent.rollout.failures import WINDOW, Failures
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Lease, Ledger, NewGroup, OpenGroup, Ready, Settled, Slot, choose
from gspo_agent.rollout.live import Rollouts
from gspo_agent.rollout.progress import Progress
from gspo_agent.trajectory import Trajectory

if TYPE_CHECKING:
    # At run time it would bring transformers along.
    from gspo_agent.chat import Chat

__all__ = ["Collector", "Progress", "Source"]

_log = logging.getLogger(__name__)
_FIRST_BACK_OFF, _LONGEST_BACK_OFF = 0.5, 30.0  # seconds
_ABORT_SECONDS, _CUT_SECONDS, _CANCEL_SECONDS = 0.3, 0.5, 0.5  # within the two seconds that `stop` may take
_AT_ONCE = 64  # groups that are created with one transaction, at most
_LOOK_SECONDS = 0.1  # between two looks at who is still inside a tool


class Collector:
    """Keeps enough groups in flight, and leases finished ones to the learner, in every `rollout.mode`.

    A keeper task creates groups: it waits for a group to finish or to be leased, and tops up. One task per episode
    plays one attempt; whoever finds no place waits for one, older groups first. `lease` waits until enough groups are
    ready, is woken by every group that finishes, and takes nothing from those that are in flight: they go on, under
    whatever weights come next. The modes differ in when groups are created, and in whether the engine is paused.
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
        self._engine, self._config, self._seed = engine, config, seed
        self._clock = Clock()
        self._attempts = Attempts(journal, ledger, chat, engine, config, self._clock)
        self._failures = Failures(config.max_failed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[tuple[Any, ...]] = []
        """A heap: slots that an earlier life began come first, then those of the oldest group."""
        self._open: set[int] = set()
        self._ready: list[Ready] = []
        self._finished: dict[int, list[Trajectory]] = {}
        """Group id -> members that ended in this life, until the group is handed out."""
        self._cursors: dict[int, int] = {}
        self._demand = config.groups_per_step
        self._leasing: float | None = None
        """Since when a lease waits for groups."""
        self._again: dict[int, Slot] = {}
        """Slots that wait until they may be tried again."""
        self._flat = 0
        """So many of the last groups that finished had equal rewards, without another between them."""
        self._paused = False
        self._topping_up, self._changed, self._halt = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._fatal: BaseException | None = None
        self._stopping = True

    async def start(self, step: int) -> None:
        """Goes on with every unfinished episode of the journal and begins what is missing; `step` is the last one.

        First what dead lives may have left is ended: requests in the engine, and what environments have outside.
        """
        if not self._stopping:
            raise RuntimeError("the collector runs already")
        await self._engine.clear(f"{self._journal.run_id}.")
        self._stopping, self._fatal, self._attempts.leaving = False, None, False
        self._halt.clear()
        self._waiting.clear()
        self._again.clear()
        self._open.clear()
        self._failures = Failures(self._config.max_failed, self._ledger.recent_causes(WINDOW))
        self._ready = self._ledger.ready()
        self._cursors = self._ledger.cursors()
        unfinished = self._ledger.unfinished()
        unknown = {group.source for group in unfinished} - set(range(len(self._sources)))
        if unknown:
            raise JournalError(
                f"{self._journal.path} has groups of [[env]] {min(unknown)}; there is no such section now"
            )
        living = self._ledger.living()
        for source in self._sources:
            await source.factory.destroy_leftovers(self._journal.run_id, living)
        self._queue(unfinished)
        self._topping_up.set()
        self._keep(self._top_up())

    async def lease(self, num_groups: int, *, step: int) -> Lease:
        """The groups of a training step: the recorded ones, or the first `num_groups` that finished.

        Waits for enough of them. Groups without variance are left out, up to `max_filtered` for a step; with
        `expired = "reroll"`, members with tokens too old for it are played again first. Raises JournalError, or the
        fault behind most failures once their share passes `max_failed`.
        """
        self._demand = max(self._demand, num_groups)
        if step not in await off_loop(self._ledger.pending_leases):
            await self._wait_for(num_groups, step)
        self._check()
        lease = await self._ledger.lease(
            step,
            num_groups,
            max_filtered=self._max_filtered,
            max_weight_lag=None if self._config.expired == "keep" else self._config.max_weight_lag,
            finished=self._finished,
        )
        if lease is None:
            raise JournalError(f"{self._journal.path}: step {step} found fewer groups ready than the collector counts")
        taken = {group.id for group in (*lease.groups, *lease.filtered)}
        self._ready = [group for group in self._ready if group.id not in taken]
        self._finished = {group: ended for group, ended in self._finished.items() if group not in taken}
        self._topping_up.set()
        return lease

    async def pause(self) -> None:
        """Returns when no token is being sampled. Tools and judges go on; what waits for tokens does not grow older."""
        await self._engine.pause()
        self._pause(True)
        self._clock.stop()

    async def resume(self) -> None:
        """Undoes `pause`; without one it does nothing."""
        await self._engine.resume()
        self._pause(False)
        self._clock.go()

    def _pause(self, paused: bool) -> None:
        """Who waits for tokens waits for the learner instead, or the other way about, from now on."""
        if paused is not self._paused:
            self._paused = paused
            for recorder in self._attempts.active.values():
                if recorder.stage == "tokens":
                    recorder.enter("tokens")

    async def stop(self, grace: float = 0.0) -> None:
        """Cuts every episode where it is; returns with everything on disk. May be called twice.

        Requests end at once. Tools and judges that run get `grace` seconds to end; no other begins. With none it takes
        less than two seconds.
        """
        self._stopping = self._attempts.leaving = True
        self._halt.set()
        self._topping_up.set()
        self._changed.set()
        active = self._attempts.active
        for slot, recorder in active.items():
            recorder.cut = True
            if recorder.stage == "quota":  # nothing of it has begun
                self._playing[slot].cancel()
        requests = [recorder.request_id for recorder in active.values() if recorder.request_id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await asyncio.gather(*map(self._engine.abort, requests), return_exceptions=True)
        await _wait(self._tasks, _CUT_SECONDS)
        await self._let_tools_end(grace - _CUT_SECONDS)
        for task in list(self._tasks):
            task.cancel()
        await _wait(self._tasks, _CANCEL_SECONDS)
        if self._tasks:
            _log.warning("%d episodes do not end when they are cancelled; they are left as they are", len(self._tasks))
        await self._journal.transact(lambda connection: None)

    async def _let_tools_end(self, seconds: float) -> None:
        """Waits at most so long for the episodes that are inside a tool or a judge."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            active = self._attempts.active
            inside = [self._playing[slot] for slot, recorder in active.items() if recorder.stage in ("tools", "judges")]
            if not inside:
                return
            await _wait(inside, _LOOK_SECONDS)

    def progress(self) -> Progress:
        active = self._attempts.active.values()
        return Progress(
            in_flight=len(active),
            generating=sum(bool(recorder.request_id) for recorder in active),
            in_tools=sum(recorder.episode.action is not None for recorder in active),
            waiting=len(self._waiting),
            ready_groups=len(self._ready),
            open_groups=len(self._open),
            failures=dict(self._failures.causes),
            restarts=self._attempts.restarts,
            tokens=self._attempts.tokens,
        )

    def live(self) -> Rollouts:
        """The same in full, for any thread."""
        failures = self._failures
        return Rollouts(
            active=tuple(self._attempts.active.values()),
            places=[slot for *_, slot in tuple(self._waiting)],
            again=tuple(self._again.values()),
            paused=self._paused,
            leasing=self._leasing,
            ready=len(self._ready),
            wanted=self._demand,
            flat=self._flat,
            failed=failures.in_a_row,
            cause=failures.last,
            failures=dict(failures.causes),
            restarts=self._attempts.restarts,
            tokens=self._attempts.tokens,
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

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        fault = None if task.cancelled() else task.exception()
        if task.cancelled() and not self._stopping:  # by a tool, say, that cancels every task it finds
            fault = EnvError(
                f"{getattr(task.get_coro(), '__qualname__', 'a task')} was cancelled, and not by its collector; see "
                "which tool or hook cancels tasks that are not its own, and run the same command again: nothing is lost"
            )
        self._fatal = self._fatal or fault
        self._changed.set()

    async def _wait_for(self, num_groups: int, step: int) -> None:
        """Returns when so many groups are ready to be trained on."""
        self._leasing = time.monotonic()
        self._topping_up.set()
        try:
            while True:
                await self._expire(step)
                if choose(self._ready, num_groups, self._max_filtered) is not None:
                    return
                self._check()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._leasing = None

    async def _expire(self, step: int) -> None:
        """Has the members of ready groups played again that are too old for this step, as far as that is wanted."""
        lag = self._config.max_weight_lag
        old = [group.oldest for group in self._ready if group.oldest is not None and step - group.oldest > lag]
        if not old or self._config.expired != "reroll":
            return
        groups = {group.id: group for group in await self._ledger.expire(step, lag)}
        self._ready = [group for group in self._ready if group.id not in groups]
        for group in groups.values():
            again = {slot.number for slot in group.slots}
            self._finished[group.id] = [t for t in self._finished.get(group.id, []) if t.index not in again]
        self._queue(list(groups.values()))

    async def _top_up(self) -> None:
        while not self._stopping:
            await self._topping_up.wait()
            self._topping_up.clear()
            while not self._stopping and (missing := self._missing()) > 0:
                self._queue(await self._create(min(missing, _AT_ONCE)))

    def _missing(self) -> int:
        """Groups to create: those in flight, and those ready that will not be filtered, count."""
        ahead = self._config.over_provision
        if self._config.mode == "sync":
            ahead = 0.0 if self._leasing is None else 1.0
        flat = sum(group.flat for group in self._ready)
        useful = len(self._ready) - min(flat, self._max_filtered)
        return math.ceil(self._demand * ahead) - useful - len(self._open)

    async def _create(self, number: int = 1) -> list[OpenGroup]:
        return await self._ledger.create_groups([self._next_group() for _ in range(number)])

    def _next_group(self) -> NewGroup:
        # The source that is furthest behind its share; the cursors are in the journal, so a restart decides alike.
        number = min(range(len(self._sources)), key=lambda n: (self._cursors.get(n, 0) + 1) / self._sources[n].weight)
        source, cursor, config = self._sources[number], self._cursors.get(number, 0), self._config
        self._cursors[number] = cursor + 1
        return NewGroup(
            number, cursor, source.factory.config.id, source.tasks.task(cursor), config.group_size,
            config.max_attempts, config.min_group, self._seed,
        )  # fmt: skip

    def _queue(self, groups: Sequence[OpenGroup]) -> None:
        for group in groups:
            self._open.add(group.id)
            for slot in group.slots:
                rank = (not slot.running, slot.group_id, slot.number, slot.attempt)
                heapq.heappush(self._waiting, (*rank, group, slot))
        self._fill()

    def _fill(self) -> None:
        """Gives free places to those that wait."""
        places = self._config.max_in_flight or math.inf
        while self._waiting and len(self._playing) < places and not self._stopping:
            *_, group, slot = heapq.heappop(self._waiting)
            self._playing[slot.id] = self._keep(self._play(group, slot))

    async def _play(self, group: OpenGroup, slot: Slot) -> None:
        try:
            await self._attempts.play(self._sources[group.source], group, slot, lambda what: self._ended(group, what))
        finally:
            del self._playing[slot.id]
            self._fill()

    def _ended(self, group: OpenGroup, outcome: Outcome) -> None:
        """Sees to what follows from the end of an attempt."""
        if outcome.trajectory is not None:
            self._finished.setdefault(group.id, []).append(outcome.trajectory)
            fault = self._failures.add(outcome.trajectory.stop_reason if outcome.failed else None)
            if fault is not None and self._fatal is None:
                self._fatal = fault
                self._keep(self._ledger.answer_failures())
        self._settle(group, outcome.settled)
        retry = outcome.settled.retry
        if retry is not None and not self._stopping:
            again = group._replace(slots=[retry])
            if outcome.failed:
                self._keep(self._back_off(again, retry))
            else:
                self._queue([again])

    def _settle(self, group: OpenGroup, settled: Settled) -> None:
        if settled.group_state != "open":
            self._open.discard(group.id)
            if settled.ready is not None:
                self._flat = self._flat + 1 if settled.ready.flat else 0
                self._ready.append(settled.ready)
            else:
                self._finished.pop(group.id, None)
            self._topping_up.set()
        self._changed.set()

    async def _back_off(self, again: OpenGroup, retry: Slot) -> None:
        """Queues another attempt after a while, longer the more there were; a stop ends the waiting."""
        self._again[retry.id] = retry
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_FIRST_BACK_OFF * 2 ** (retry.attempt - 1), _LONGEST_BACK_OFF)):
                await self._halt.wait()
        del self._again[retry.id]
        self._queue([again])


async def _wait(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    """At most so long for tasks that may fail or be cut."""
    if tasks:
        await asyncio.wait(list(tasks), timeout=seconds)
