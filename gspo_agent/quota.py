"""Quota: a rate and a concurrency that many callers share; each waits for its turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from types import TracebackType

from asyncio_throttle import Throttler

from gspo_agent.waiting import aside


class Quota:
    """At most `rate` entries in one `period` of seconds, and at most `concurrency` callers inside.

    >>> quota = Quota(rate=5, concurrency=2)
    >>> async with quota:
    ...     await search(query)

    Callers wait in the order in which they came; who is cancelled leaves the queue. A throttler's waiters each poll, so
    a single task, which lives while anybody waits, asks the throttler on behalf of all of them. One event loop at a
    time; the rate holds across loops, callers do not.

    Args:
        rate: May be a fraction: 0.5 is one entry in two periods. None: no limit.
        period: Seconds.
        concurrency: None: no limit.
        name: Of what is limited, for messages.
    """

    def __init__(
        self, rate: float | None = None, period: float = 1.0, concurrency: int | None = None, name: str = "quota"
    ) -> None:
        for what, value in (("rate", rate), ("period", period), ("concurrency", concurrency)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {what} = {value!r} is not positive")
        self.name, self._concurrency = name, concurrency
        self._throttler: Throttler | None = None
        if rate is not None:
            # The throttler counts whole entries: 2.5 a second are 2 in 0.8 s, 0.5 a second 1 in 2 s.
            whole = max(1, int(rate))
            span = period * whole / rate
            self._throttler = Throttler(whole, span, min(0.01, span / 10))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._dispatcher: asyncio.Task[None] | None = None
        self._inside = 0
        self._room = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Callers in the queue."""
        return len(self._queue)

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._begin(loop)
        turn: asyncio.Future[None] = loop.create_future()
        self._queue[turn] = None
        if self._dispatcher is None:
            self._dispatcher = loop.create_task(self._dispatch())
        try:
            with aside("quota"):
                await turn
        except BaseException:
            self._queue.pop(turn, None)
            if turn.done() and not turn.cancelled():  # cancelled with the turn in hand
                self._leave()
            if not self._queue and self._dispatcher is not None:
                self._dispatcher.cancel()
                self._dispatcher = None
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forgets the callers of a loop that is gone."""
        self._loop, self._queue, self._dispatcher = loop, OrderedDict(), None
        self._inside, self._room = 0, asyncio.Event()

    def _leave(self) -> None:
        if self._loop is asyncio.get_running_loop():  # a loop that is gone took its callers along
            self._inside -= 1
            self._room.set()

    def _give(self) -> None:
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():  # else its caller is being cancelled at this moment
                self._inside += 1
                turn.set_result(None)
                return

    async def _dispatch(self) -> None:
        """Gives turns while anybody waits, each when the concurrency and then the throttler let it."""
        try:
            while self._queue:
                if self._concurrency is not None and self._inside >= self._concurrency:
                    self._room.clear()
                    await self._room.wait()
                    continue
                if self._throttler is not None:
                    await self._throttler.acquire()
                self._give()
        finally:
            if self._dispatcher is asyncio.current_task():
                self._dispatcher = None
