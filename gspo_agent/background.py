"""What an event loop of thousands of episodes needs beside it: threads for blocking work, and a garbage collector that
seldom comes by."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def off_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a blocking function in a daemon thread, so that a cut never waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome: Any = function(*arguments)
            setter: Callable[[Any], None] = future.set_result
        except BaseException as error:
            outcome, setter = error, future.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, setter, outcome)

    threading.Thread(target=work, name=getattr(function, "__name__", "work"), daemon=True).start()
    return await future


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
