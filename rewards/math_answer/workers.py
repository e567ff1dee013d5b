"""Worker processes for what the parser leaves undecided. They can be killed, and nothing waits longer than their limit.

No signals, no threads that could hang, nothing inherited: a worker is a fresh interpreter with an empty environment.
Covered: endless work, memory, files, a worker that dies. Not covered: a flaw of sympy that runs code, which is why it
gets nodes of our own parser, never text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rewards.math_answer.normal import normal_form
from rewards.math_answer.verdict import Options, Verdict, judge_text

_log = logging.getLogger(__name__)
_ROOT = Path(__file__).parents[2]
_JOBS = 2000
"""After which a worker is replaced."""
_START_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    jobs: int = 0
    busy: bool = False


class Workers:
    """A pool that is opened and closed: `async with Workers() as workers: await workers.verify(text, gold)`.

    `verify` waits for a free worker, and for that not longer than `wall_s`. Cancelling it kills the worker; what is
    still asked when the pool is closed is unscored.

    Args:
        size: Processes at work at the same time.
        spares: Warm ones beside them, so that a kill costs nobody a start.
        wall_s: Seconds that one answer may take.
    """

    def __init__(self, size: int = 1, spares: int = 1, wall_s: float = 2.0) -> None:
        self.wall_s = wall_s
        self.killed = 0
        """Workers that were ended at the limit or died."""
        self._num = size + spares
        self._places = asyncio.Semaphore(size)
        self._ready: asyncio.Queue[_Worker | None] = asyncio.Queue()
        """None wakes those who wait when it is closed."""
        self._open = False
        self._starting: set[asyncio.Task[None]] = set()
        self._alive: set[_Worker] = set()

    async def __aenter__(self) -> Workers:
        """Waits for the first worker. RuntimeError where none can be started."""
        self._open, self._ready = True, asyncio.Queue()
        for _ in range(self._num - 1):
            self._start()
        try:
            await self._started()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        self._ready.put_nowait(None)
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for worker in list(self._alive):
            await self._end(worker)

    async def verify(self, text: str, gold: str, **options: Any) -> Verdict:
        """Like `verify`, in a thread; what that leaves undecided is asked of a worker. RuntimeError if closed."""
        if not self._open:
            raise RuntimeError("the workers of the math verifier are closed; verify inside `async with Workers()`")
        asked = Options(**options)
        verdict, answer = await asyncio.to_thread(judge_text, text, gold, asked)
        if verdict.reason != "undecided" or answer is None:
            return verdict
        started = time.perf_counter()
        job = {"answer": normal_form(answer), "gold": gold, "options": asdict(asked)}
        correct, reason, path = await self._asked(json.dumps(job).encode() + b"\n")
        ms = verdict.ms + 1000 * (time.perf_counter() - started)
        return replace(verdict, correct=correct, reason=reason, path=path, ms=ms)

    async def _asked(self, line: bytes) -> tuple[bool, str, str]:
        async with self._places:
            for _ in range(2):  # a worker may have died of something else
                finished = False
                try:
                    async with asyncio.timeout(_START_SECONDS):
                        worker = await self._living()
                except TimeoutError:
                    break
                if worker is None:
                    break
                try:
                    async with asyncio.timeout(self.wall_s):
                        said = await self._done(worker, line)
                    finished = bool(said)
                except TimeoutError:
                    return False, "timeout", "sympy"
                except OSError:
                    said = b""
                finally:
                    await self._back(worker, keep=finished)
                if said:
                    correct, reason, path = json.loads(said)
                    return correct, reason, path
        return False, "worker_died", "sympy"

    async def _living(self) -> _Worker | None:
        """The next worker that did not die while it had nothing to do; None once the pool is closed."""
        while (worker := await self._ready.get()) is not None:
            if worker.process.returncode is None:
                return worker
            await self._back(worker, keep=False)
        self._ready.put_nowait(None)
        return None

    async def _done(self, worker: _Worker, line: bytes) -> bytes:
        worker.busy = True
        assert worker.process.stdin is not None
        assert worker.process.stdout is not None
        worker.process.stdin.write(line)
        await worker.process.stdin.drain()
        return await worker.process.stdout.readline()

    async def _back(self, worker: _Worker, *, keep: bool) -> None:
        worker.jobs += 1
        worker.busy = False
        if keep and worker.jobs < _JOBS and self._open:
            self._ready.put_nowait(worker)
            return
        self.killed += not keep
        self._start()
        await asyncio.shield(self._end(worker))

    def _start(self) -> None:
        if not self._open:
            return
        task = asyncio.create_task(self._started())
        self._starting.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a worker of the math verifier: %s", error)

    async def _started(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-s", "-P", "-m", "rewards.math_answer.worker"),
            cwd="/",
            env={"PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        worker = _Worker(process)
        self._alive.add(worker)
        assert process.stdout is not None
        try:
            said = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        except (TimeoutError, asyncio.CancelledError):
            await self._end(worker)
            raise
        if said != b"ready\n":
            await self._end(worker)
            raise RuntimeError("a worker of the math verifier did not start; is sympy installed?")
        self._ready.put_nowait(worker)

    async def _end(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        await worker.process.wait()
