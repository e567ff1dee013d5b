"""What an event loop of thousands of episodes needs beside it: threads for blocking work, and a garbage collector that
seldom comes by."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


async def off_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a blocking function in a daemon thread, so that a cut never waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    work = (loop, future, function, *arguments)
    threading.Thread(target=_settled, args=work, name=getattr(function, "__name__", "work"), daemon=True).start()
    return await future


class Crew:
    """Daemon threads that do one job after another: a loop that hands one over waits for no thread to start, and among
    few threads it gets its own turn soon.

    Args:
        size: Threads, started one by one as there are more jobs than threads to do them.
        name: Of the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Waits for `function(*arguments)`; a cut leaves it to itself."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(lambda: _settled(loop, future, function, *arguments))
        if self._threads < self._size:
            self._threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return await future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # a thread that waits keeps nothing alive

    def end(self) -> None:
        """Its threads end when the jobs before this are done."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = 0


def _settled(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], function: Callable[..., T], *arguments: Any
) -> None:
    """Does the work and tells the loop, unless that is closed by then."""

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    try:
        outcome: Any = function(*arguments)
        setter: Callable[[Any], None] = future.set_result
    except BaseException as error:
        outcome, setter = error, future.set_exception
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(settle, setter, outcome)


@contextmanager
def rare_collections() -> Iterator[None]:
    """What is loaded by now is never walked again, and what comes is walked when most of it has gone by itself.

    The objects of a turn live as long as the turn; with Python's own thresholds each is walked several times meanwhile,
    about an eighth of a run's CPU.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
