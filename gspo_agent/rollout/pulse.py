"""Pulse: every two seconds a running process looks at itself, writes down what it saw, and says what stands still."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Protocol, Self

from gspo_agent.engine.base import Counting
from gspo_agent.errors import EngineError, JournalError
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.live import Live, Loss, Rollouts, all_in_flight, staleness, write_live
from gspo_agent.rollout.owner import Owner
from gspo_agent.rollout.stages import Phase, at_work, episode_stages, learner_stage, remarks
from gspo_agent.rollout.status import InFlight, RunStatus, run_status
from gspo_agent.rollout.watchdog import Watchdog, Work
from gspo_agent.trajectory import version_step

_log = logging.getLogger(__name__)
_SHARE = 50  # so much longer than a look took this waits for the next: at most a fiftieth of one core
_SLOW_SECONDS = 10.0  # at least, between two looks at what takes long or changes slowly: the journal, tokens' ages
_LAST_SECONDS = 0.3  # that the last look waits for the one before, and for the journal's answer


class Watched(Protocol):
    """What a collector offers for this."""

    def live(self) -> Rollouts: ...


class Pulse:
    """Writes live.json beside the journal and feeds the watchdog, in a thread of its own, between `with` and its end.

    It only reads what the event loop changes, needs no lock for it, and takes at most two per cent of a core. What
    cannot be written (a full disk) stays unwritten and stops nothing. Needs a running event loop, whose stillness it
    tells too.
    """

    def __init__(
        self,
        journal: Journal,
        phase: Callable[[], Phase],
        *,
        patience: float,
        every: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watchdog = Watchdog(patience, clock)
        self._journal, self._phase, self._every, self._clock = journal, phase, every, clock
        self._directory = journal.path.parent
        file = journal.path.stat()  # once: whoever moves it away ends the run, not this
        self._where, self._inode = str(journal.path.resolve()), (file.st_dev, file.st_ino)
        self._collector: Watched | None = None
        self._engine: object = None
        self._ledger: RunStatus | None = None
        self._ledger_at = self._next_question = self._next_staleness = 0.0
        self._staleness: dict[int, int] = {}
        self._question: Future[tuple[RunStatus, float] | None] | None = None
        self._leasing: float | None = None
        self._waited = self._usual = 0.0
        self._asked = self._answered = 0
        self._unwritten = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._writing = threading.Lock()

    def watch(self, collector: Watched, engine: object) -> None:
        """From now on these are looked at too."""
        self._collector, self._engine = collector, engine

    def concerns(self) -> str:
        """What stands still, on one line; "" where nothing does."""
        return "; ".join([*map(str, self.watchdog.still), *self.watchdog.remarks])

    def __enter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_LAST_SECONDS)
        self._next_question = 0.0
        self._ask_ledger(self._clock())
        if self._question is not None:
            wait([self._question], _LAST_SECONDS)
        self._look_or_log(ended=True)

    def _run(self) -> None:
        wait = 0.0
        while not self._ended.wait(wait):
            before = time.thread_time()
            self._look_or_log()
            wait = max(self._every, _SHARE * (time.thread_time() - before))

    def _look_or_log(self, ended: bool = False) -> None:
        try:
            self.look(ended)
        except Exception:  # looking must not end what is looked at, nor hide what ended it
            _log.exception("live.json is not written; the run goes on")

    def look(self, ended: bool = False) -> Live:
        """One look: tells the watchdog, writes the record, returns it."""
        now = self._clock()
        rollouts = None if self._collector is None else self._collector.live()
        sampled = self._sampled(rollouts)
        in_flight = () if rollouts is None else all_in_flight(rollouts, sampled, now)
        self._ask_ledger(now)
        if rollouts is not None and (ended or now >= self._next_staleness):
            self._next_staleness = now + _SLOW_SECONDS
            with suppress(EngineError):  # it has no weights yet, and waits for a server that takes them
                self._staleness = staleness(rollouts, version_step(getattr(self._engine, "weight_version", 0)) + 1)
        if not ended:
            for line in self._bark(rollouts, in_flight, sum(sampled.values()), now):
                _log.warning("%s", line)
        live = self._record(rollouts, in_flight, sampled, now, ended)
        try:
            with self._writing:  # every record is made under the same name, and then renamed
                if ended or not self._ended.is_set():  # the last record stays the last
                    write_live(self._directory, live)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                _log.warning("%s/live.json cannot be written (%s); the run goes on", self._directory, error)
            self._unwritten = True
        return live

    def _sampled(self, rollouts: Rollouts | None) -> Mapping[str, int]:
        """Request id -> tokens so far, or all that may be, where the engine does not tell."""
        if isinstance(self._engine, Counting):
            return self._engine.unjournaled()
        if rollouts is None:
            return {}
        return {recorder.request_id: recorder.asked for recorder in rollouts.active if recorder.request_id}

    def _bark(self, rollouts: Rollouts | None, in_flight: Sequence[InFlight], sampled: int, now: float) -> list[str]:
        """What has to be said now."""
        dog, writes = self.watchdog, self._journal.writes
        stages = [
            learner_stage(self._phase()),
            Work("journal", {"disk"} if writes else set(), f"{writes} writes", self._journal.commits),
            self._loop_stage(),
        ]
        if rollouts is None:
            return dog.look(stages)
        working = at_work(rollouts, in_flight)
        said = dog.look([*stages, *episode_stages(working, rollouts.tokens + sampled)])
        waited, usual = self._wait_of_learner(rollouts.leasing, now)

        def moves(stage: str) -> bool:
            return dog.moves(stage, dog.patience / 2)

        return said + dog.hear(
            remarks(rollouts, in_flight, working, moves=moves, patience=dog.patience, waited=waited, usual=usual)
        )

    def _wait_of_learner(self, since: float | None, now: float) -> tuple[float, float]:
        """Seconds of its wait for groups, and of its longest one before."""
        if since != self._leasing:
            self._usual, self._leasing = max(self._usual, self._waited), since
        self._waited = 0.0 if since is None else now - since
        return self._waited, self._usual

    def _loop_stage(self) -> Work:
        """The event loop answers a question of each look; where it does not, somebody's code blocks it."""
        where = ""
        if self._asked > self._answered:
            where = _place(self._loop_thread)
        else:
            self._asked += 1
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._answer)
        return Work("event loop", {"loop"}, where, self._answered)

    def _answer(self) -> None:
        self._answered += 1

    def _ask_ledger(self, now: float) -> None:
        """Takes the journal's answer, if there is one, and asks again now and then; waits for nothing."""
        if self._question is not None and self._question.done():
            if self._question.exception() is None and (answer := self._question.result()) is not None:
                self._ledger, seconds = answer
                self._ledger_at = time.time()
                self._next_question = now + max(_SLOW_SECONDS, _SHARE * seconds)
            self._question = None
        if self._question is None and now >= self._next_question:
            with suppress(JournalError):  # whoever writes will be told
                self._question = self._journal.submit(self._read_ledger)

    def _read_ledger(self, connection: sqlite3.Connection) -> tuple[RunStatus, float] | None:
        before = time.thread_time()
        try:
            status = run_status(connection, self._journal.path, in_flight=False)
        except sqlite3.Error as error:  # a question must not end the journal
            _log.warning("%s: no status: %s", self._journal.path, error)
            return None
        return status, time.thread_time() - before

    def _record(
        self,
        rollouts: Rollouts | None,
        in_flight: tuple[InFlight, ...],
        sampled: Mapping[str, int],
        now: float,
        ended: bool,
    ) -> Live:
        phase = self._phase()
        return Live(
            owner=Owner(self._journal.life, socket.gethostname(), os.getpid(), time.time(), ended),
            journal=self._where,
            inode=self._inode,
            phase=phase.text,
            phase_seconds=round(now - phase.since, 1),
            in_flight=in_flight,
            loss=_loss(rollouts, in_flight, sampled),
            staleness=self._staleness,
            failures={} if rollouts is None else rollouts.failures,
            restarts=0 if rollouts is None else rollouts.restarts,
            tokens=0 if rollouts is None else rollouts.tokens,
            still=self.watchdog.still,
            remarks=self.watchdog.remarks,
            ledger=self._ledger,
            ledger_at=self._ledger_at,
        )


def _loss(rollouts: Rollouts | None, in_flight: Sequence[InFlight], sampled: Mapping[str, int]) -> Loss:
    running = [r for r in rollouts.active if r.request_id] if rollouts is not None else []
    unjournaled = sum(episode.unjournaled for episode in in_flight)
    # Of a running request as many as it may still bring, of the others what there is.
    may_come = sum(recorder.asked - sampled.get(recorder.request_id, 0) for recorder in running)
    return Loss(len(running), unjournaled, unjournaled + may_come)


def _place(thread: int) -> str:
    """Where a thread is, innermost first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
