"""Worker processes for what the parser leaves undecided. They can be killed, and nothing waits longer than their limit.

No signals, no threads that could hang, nothing inherited: a worker is a fresh interpreter with an empty environment.
Covered: endless work, memory, files, a worker that dies, a machine that gives it no time. Not covered: a flaw of sympy
that runs code, which is why it gets nodes of our own parser, never text; math-verify, where it is asked for, gets text.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from gspo_agent.background import Crew
from gspo_agent.errors import ConfigError
from rewards.math_answer.normal import normal_form
from rewards.math_answer.verdict import Options, Verdict, judge_text, read_gold

_log = logging.getLogger(__name__)
_ROOT = Path(__file__).parents[2]
_JOBS = 2000
"""After which a worker is replaced."""
_START_SECONDS = 60.0
_ATTEMPTS = 2  # a worker may have died of something else than its job
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Workers:
    """A pool for any thread and any event loop, also several: `with Workers() as workers: workers.judge(text, gold)`.

    A process is started when the first answer needs one. A fork of this process starts its own.

    Args:
        size: Answers worked on at the same time; others wait for their turn. None: as many as there are processors.
        spares: Warm processes beside those at work, so that a kill costs nobody a start.
        cpu_s: Seconds of work that one answer may take: more is a timeout, and wrong.
        wall_s: Seconds that it may take in all: past them the machine has no time for it, and nobody knows.
    """

    def __init__(self, size: int | None = None, spares: int = 1, cpu_s: float = 2.0, wall_s: float = 20.0) -> None:
        self.cpu_s, self.wall_s, self._spares = cpu_s, wall_s, spares
        self.killed = 0
        """Workers that were ended at the limit, or died, or whose answer nobody waited for any more."""
        self._size = size or len(os.sched_getaffinity(0))
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        # The interpreter runs one thread at a time; a loop would have to wait its turn among all that parse.
        self._parser, self._askers = Crew(1, "math answer"), Crew(self._size, "math worker")
        self._places = threading.Semaphore(self._size)
        self._idle: dict[bool, deque[_Worker]] = {False: deque(), True: deque()}  # with math-verify: True
        self._busy: set[_Worker] = set()
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
        self._parser.end()
        self._askers.end()
        for worker in idle:
            worker.end()

    async def verify(self, text: str, gold: str, options: Options | None = None) -> Verdict:
        """`judge` beside the event loop. Cancelling it kills the worker that is at it."""
        asked, job = options or Options(), _Job()
        if asked.second_opinion:
            need_math_verify()
        verdict, answer = await self._parser.run(judge_text, text, gold, asked)
        if verdict.reason != "undecided" or answer is None:
            return verdict
        try:
            return await self._askers.run(self._decided, verdict, answer, gold, asked, job)
        except asyncio.CancelledError:
            job.give_up()
            raise

    def judge(self, text: str, gold: str, options: Options | None = None) -> Verdict:
        """Like `verify`, in this thread; what that leaves undecided is asked of a worker, and waited for.

        Waits for its turn, then at most `wall_s`, or twice that where a worker died or starved. A verdict that is not
        `scored` says nothing about the answer. ConfigError where a second opinion is asked for and math-verify is not
        installed.
        """
        asked = options or Options()
        if asked.second_opinion:
            need_math_verify()
        verdict, answer = judge_text(text, gold, asked)
        if verdict.reason != "undecided" or answer is None:
            return verdict
        return self._decided(verdict, answer, gold, asked, _Job())

    def _decided(self, verdict: Verdict, answer: str, gold: str, asked: Options, job: _Job) -> Verdict:
        line = {
            "answer": normal_form(answer), "gold": read_gold(gold).normal, "options": asdict(asked), "cpu_s": self.cpu_s
        }  # fmt: skip
        with self._places:
            started = time.perf_counter()
            correct, reason, path = self._asked(json.dumps(line).encode() + b"\n", job, asked.second_opinion)
            ms = verdict.ms + 1000 * (time.perf_counter() - started)
        return replace(verdict, correct=correct, reason=reason, path=path, ms=ms)

    def _asked(self, line: bytes, job: _Job, second_opinion: bool) -> tuple[bool, str, str]:
        reason = "worker_died"
        for _ in range(_ATTEMPTS):
            if job.given_up:
                break
            worker, said = self._take(second_opinion), b""
            try:
                job.begun_by(worker)
                worker.get_ready(_START_SECONDS)
                said = worker.ask(line, self.cpu_s, self.wall_s)
            except TooMuchWork:
                return False, "timeout", "sympy"
            except TimeoutError:
                reason = "starved"
            except OSError as error:
                _log.error("a worker of the math verifier: %s", error)
            finally:
                job.left()
                self._back(worker, keep=bool(said))
            if said:
                correct, reason, path = json.loads(said)
                return correct, reason, path
        return False, reason, "sympy"

    def _take(self, second_opinion: bool) -> _Worker:
        """A worker, warm if there is one; the spares start meanwhile."""
        idle = self._idle[second_opinion]
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers of the math verifier are closed")
            for worker in [worker for worker in idle if worker.ended]:  # while it had nothing to do
                idle.remove(worker)
                worker.end()
                self.killed += 1
            while len(idle) < 1 + self._spares:
                idle.append(_Worker(second_opinion))
            worker = idle.popleft()
            self._busy.add(worker)
            return worker

    def _back(self, worker: _Worker, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            self.killed += not keep
            if keep and worker.jobs < _JOBS and not self._closed:
                self._idle[worker.second_opinion].appendleft(worker)
                return
        worker.end()

    def _forget(self) -> None:
        """In a fork: the processes, and the threads that may have held the lock, are the parent's."""
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
        self._worker: _Worker | None = None
        self.given_up = False

    def begun_by(self, worker: _Worker) -> None:
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


class TooMuchWork(Exception):
    """An answer took a worker longer than it may."""


class _Worker:
    """One process, started and not waited for."""

    def __init__(self, second_opinion: bool) -> None:
        command = [sys.executable, "-s", "-P", "-m", "rewards.math_answer.worker"]
        self._process = subprocess.Popen(
            [*command, "second_opinion"] if second_opinion else command,
            bufsize=0,
            cwd="/",
            env={"PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid, self.second_opinion = self._process.pid, second_opinion
        self.jobs = 0
        self._ready = False
        self._said = b""

    def get_ready(self, seconds: float) -> None:
        """Waits for what it loads first. Raises OSError where it does not start."""
        if self._ready:
            return
        with contextlib.suppress(TimeoutError):
            self._ready = self._line(seconds) == b"ready"
        if not self._ready:
            raise OSError(f"it did not start within {seconds:g} s, or ended; is sympy installed?")

    def ask(self, line: bytes, cpu_s: float, wall_s: float) -> bytes:
        """What it answers to `line`; b"" where it has ended. Raises TooMuchWork or TimeoutError."""
        assert self._process.stdin is not None
        self.jobs += 1
        until, most = time.monotonic() + wall_s, self._cpu_seconds() + cpu_s
        self._process.stdin.write(line)
        while (left := until - time.monotonic()) > 0:
            work = most - self._cpu_seconds()
            if work <= 0:
                raise TooMuchWork
            with contextlib.suppress(TimeoutError):
                return self._line(min(left, max(work, _TICK)))
        raise TimeoutError

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) * _TICK

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        out, until = self._process.stdout.fileno(), time.monotonic() + seconds
        poll = select.poll()
        poll.register(out, select.POLLIN)
        while b"\n" not in self._said:
            if not poll.poll(max(0, math.ceil(1000 * (until - time.monotonic())))):
                raise TimeoutError
            piece = os.read(out, 1 << 16)
            if not piece:
                return b""
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return line

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._close()

    def forget(self) -> None:
        """Lets go of a process that is another process's child."""
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
