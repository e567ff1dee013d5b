"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
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
