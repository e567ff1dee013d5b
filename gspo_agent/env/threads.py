"""The framework's own daemon threads, for synchronous hooks, and for asynchronous hooks of synchronous callers.

A `Lane` gives one environment one thread, so that what is tied to a thread (an SQLite connection, a browser) works.
There are as many as environments in flight; a thread whose lane is released serves the next one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Jobs = SimpleQueue[Callable[[], None] | None]

_idle: deque[_Jobs] = deque()
_here = threading.local()


class DeadlinePassed(Exception):
    """A synchronous call ran past its deadline. It may still be running."""


class Lane:
    """One thread for the calls of one owner, in order."""

    def __init__(self) -> None:
        self._jobs: _Jobs | None = None
        self.stuck = False
        """A call was given up on while its thread was still in it."""

    async def run(self, function: Callable[..., T], /, *args: Any, timeout: float | None = None) -> T:
        """Waits for `function(*args)`, one thread hop away; raises what it raised, or DeadlinePassed.

        After a deadline or a cancellation the lane is `stuck`: the thread cannot be interrupted.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = copy_context()

        def job() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = (context.run(function, *args), None)
            except BaseException as error:
                outcome = (None, error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, done, outcome)

        self.put(job)
        timer = None if timeout is None else loop.call_later(timeout, _settle, done, (None, DeadlinePassed()))
        try:
            value, error = await done
        except asyncio.CancelledError:
            self.stuck = True
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if error is None:
            return value  # type: ignore[no-any-return]
        if isinstance(error, DeadlinePassed):
            self.stuck = True
        if not isinstance(error, Exception):  # sys.exit() in a hook must not end the event loop
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise error

    def put(self, job: Callable[[], None]) -> None:
        """Queues `job`, which must not raise, and returns at once."""
        if self._jobs is None:
            self._jobs = _thread()
        self._jobs.put(job)

    def release(self) -> None:
        """Gives the thread back; one that is stuck ends when its call does."""
        jobs, self._jobs = self._jobs, None
        if jobs is None:
            return
        if self.stuck:
            jobs.put(None)
            self.stuck = False
        else:
            _idle.append(jobs)

    def __del__(self) -> None:
        self.release()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs an asynchronous hook for a synchronous caller, in one event loop that all such callers share.

    Raises RuntimeError inside that loop, where waiting would never end.
    """
    loop = _bridge()
    if getattr(_here, "loop", None) is loop:
        coroutine.close()
        raise RuntimeError("an asynchronous hook called a synchronous method of its environment; await the a-method")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        jobs: _Jobs | None = getattr(_here, "jobs", None)
        if jobs is not None:
            _serve_until(future, jobs)
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _serve_until(future: Any, jobs: _Jobs) -> None:
    """A lane's own thread goes on serving the lane while it waits: the coroutine may need it."""
    future.add_done_callback(lambda _: jobs.put(_wake))
    last = False
    while not future.done():
        job = jobs.get()
        if job is None:
            last = True
        else:
            job()
    if last:
        jobs.put(None)


def _wake() -> None: ...


def _settle(done: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    if not done.done():
        done.set_result(outcome)


def _thread() -> _Jobs:
    try:
        return _idle.pop()
    except IndexError:
        jobs: _Jobs = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="gspo_agent hook", daemon=True).start()
        return jobs


def _serve(jobs: _Jobs) -> None:
    _here.jobs = jobs
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread keeps no environment alive


_bridge_loop: asyncio.AbstractEventLoop | None = None
_bridge_lock = threading.Lock()


def _bridge() -> asyncio.AbstractEventLoop:
    global _bridge_loop
    with _bridge_lock:
        if _bridge_loop is None:
            _bridge_loop = asyncio.new_event_loop()
            threading.Thread(target=_run_bridge, args=(_bridge_loop,), name="gspo_agent bridge", daemon=True).start()
        return _bridge_loop


def _run_bridge(loop: asyncio.AbstractEventLoop) -> None:
    _here.loop = loop
    loop.run_forever()


def _forget_threads() -> None:
    """Threads do not survive a fork."""
    global _bridge_loop, _bridge_lock
    _bridge_loop, _bridge_lock = None, threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_threads)
