"""Worker processes for every answer that is judged beside an event loop, and elsewhere for what the parser leaves
undecided. They can be killed, and nothing waits longer than their limit.

No signals, no threads that could hang, nothing inherited: a worker comes of a fresh interpreter with an empty
environment. Covered: endless work, memory, files, a worker that dies, a machine that gives it no time. Not covered: a
flaw of sympy that runs code, which is why it gets nodes of our own parser, never text; math-verify, where it is asked
for, gets text.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import Self

from gspo_agent.background import Crew
from gspo_agent.errors import ConfigError
from rewards.math_answer.processes import TooMuchWork, Worker, WorkerServer
from rewards.math_answer.verdict import Options, Verdict, judge_text

_log = logging.getLogger(__name__)
_PARSERS = 2  # of milliseconds each: while one is at a large answer, the other goes on
_JOBS = 2000
"""After which a worker is replaced."""
_START_SECONDS = 60.0
_ATTEMPTS = 2  # a worker may have died of something else than its job


class Workers:
    """A pool for any thread and any event loop, also several: `with Workers() as workers: workers.judge(text, gold)`.

    A process is started when the first answer needs one. A fork of this process starts its own.

    Args:
        size: Undecided answers worked on at the same time; others wait for their turn. None: as many as there are
            processors.
        cpu_s: Seconds of work that one answer may take: more is a timeout, and wrong.
        wall_s: Seconds that it may take in all: past them the machine has no time for it, and nobody knows.
    """

    def __init__(self, size: int | None = None, cpu_s: float = 2.0, wall_s: float = 20.0) -> None:
        self.cpu_s, self.wall_s = cpu_s, wall_s
        self.killed = 0
        """Workers that were ended at the limit, or died, or whose answer nobody waited for any more."""
        self._size = size or len(os.sched_getaffinity(0))
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._parsing, self._proving = Crew(_PARSERS, "math parser"), Crew(self._size, "math prover")
        self._places = threading.Semaphore(self._size)
        self._server: WorkerServer | None = None
        self._idle: dict[str, deque[Worker]] = {kind: deque() for kind in ("parser", "sympy", "math-verify")}
        self._busy: set[Worker] = set()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process; whoever still waits for one gets a RuntimeError."""
        with self._lock:
            self._closed = True
            for worker in self._busy:
                worker.kill()  # its caller sees the end of it, and clears it away
            idle = [worker for several in self._idle.values() for worker in several]
            for several in self._idle.values():
                several.clear()
            server, self._server = self._server, None
        self._parsing.end()
        self._proving.end()
        if server:
            server.end()
        for worker in idle:
            worker.end()

    async def verify(self, text: str, gold: str, options: Options | None = None) -> Verdict:
        """`judge` beside the event loop, which never waits for it: nothing of it is done in this process, whose threads
        take turns. Cancelling it kills the worker that is at it."""
        asked, job = options or Options(), _Job()
        if asked.second_opinion:
            need_math_verify()
        try:
            verdict = await self._parsing.run(self._asked, "parser", text, gold, asked, job)
            if verdict.reason == "undecided":
                verdict = await self._proving.run(self._decided, verdict, text, gold, asked, job)
        except asyncio.CancelledError:
            job.give_up()
            raise
        return verdict

    def judge(self, text: str, gold: str, options: Options | None = None) -> Verdict:
        """Like `verify` of this package, in this thread; what that leaves undecided is asked of a worker.

        Waits for its turn, then at most `wall_s`, or twice that where a worker died or starved. A verdict that is not
        `scored` says nothing about the answer. ConfigError where a second opinion is asked for and math-verify is not
        installed.
        """
        asked = options or Options()
        if asked.second_opinion:
            need_math_verify()
        verdict, _ = judge_text(text, gold, asked)
        return self._decided(verdict, text, gold, asked, _Job()) if verdict.reason == "undecided" else verdict

    def _decided(self, verdict: Verdict, text: str, gold: str, asked: Options, job: _Job) -> Verdict:
        with self._places:
            said = self._asked("math-verify" if asked.second_opinion else "sympy", text, gold, asked, job)
        return replace(said, extracted=verdict.extracted, ms=verdict.ms + said.ms)

    def _asked(self, kind: str, text: str, gold: str, asked: Options, job: _Job) -> Verdict:
        """What a worker of this kind says, or why none says anything."""
        started, reason = time.perf_counter(), "worker_died"
        for _ in range(_ATTEMPTS):
            if job.given_up:
                break
            worker, verdict = None, None
            try:
                worker = self._take(kind)
                job.begun_by(worker)
                worker.get_ready(_START_SECONDS)
                verdict = worker.ask(text, gold, asked, self.cpu_s, self.wall_s)
            except TooMuchWork:
                reason = "timeout"
                break
            except TimeoutError:
                reason = "starved"
            except OSError as error:
                _log.error("a worker of the math verifier: %s", error)
            finally:
                job.left()
                if worker:
                    self._back(worker, keep=verdict is not None)
            if verdict:
                return verdict
        return Verdict(False, reason, None, kind, 1000 * (time.perf_counter() - started))

    def _take(self, kind: str) -> Worker:
        """A worker that has nothing to do, or a new one."""
        idle = self._idle[kind]
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers of the math verifier are closed")
            while idle and idle[0].ended:  # while it had nothing to do
                idle.popleft().end()
                self.killed += 1
            worker = idle.popleft() if idle else self._started(kind)
            self._busy.add(worker)
            return worker

    def _started(self, kind: str) -> Worker:
        if self._server:
            try:
                return self._server.worker(kind)
            except OSError:  # it was killed
                self._server.end()
        self._server = WorkerServer()
        return self._server.worker(kind)

    def _back(self, worker: Worker, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            self.killed += not keep
            if keep and worker.jobs < _JOBS and not self._closed:
                self._idle[worker.kind].appendleft(worker)
                return
        worker.end()

    def _forget(self) -> None:
        """In a fork: the processes, and the threads that may have held the lock, are the parent's."""
        if self._server:
            self._server.forget()
        for workers in (*self._idle.values(), self._busy):
            for worker in workers:
                worker.forget()
        self._begin()


@functools.cache
def need_math_verify() -> None:
    """Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("a second opinion needs math-verify: pip install 'gspo_agent[math-verify]'")


_pools: weakref.WeakSet[Workers] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._forget()


os.register_at_fork(after_in_child=_forget_all)


class _Job:
    """What somebody waits for, until he gives it up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self.given_up = False

    def begun_by(self, worker: Worker) -> None:
        with self._lock:
            self._worker = worker
            if self.given_up:
                worker.kill()

    def left(self) -> None:
        """The worker is at it no longer."""
        with self._lock:
            self._worker = None

    def give_up(self) -> None:
        with self._lock:
            self.given_up = True
            if self._worker is not None:
                self._worker.kill()
