"""The clock that an episode's limits of time are read from: it stands still while nothing of it can go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Clock:
    """Seconds that pass unless it is stopped, and alarms that wait along with it."""

    def __init__(self, time: Callable[[], float] = time.monotonic) -> None:
        self._time = time
        self._stopped_at: float | None = None
        self._stood = 0.0
        self._waiting: set[Alarm] = set()

    def now(self) -> float:
        """Seconds since some moment, without those in which it stood still."""
        return (self._time() if self._stopped_at is None else self._stopped_at) - self._stood

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._time()

    def go(self) -> None:
        if self._stopped_at is None:
            return
        self._stood += self._time() - self._stopped_at
        self._stopped_at = None
        waiting, self._waiting = self._waiting, set()
        for alarm in waiting:
            alarm.wait()

    def alarm(self, seconds: float, ring: Callable[[], object]) -> Alarm:
        """Calls `ring` once, when `seconds` of this clock have passed; needs a running event loop."""
        alarm = Alarm(self, self.now() + seconds, ring)
        alarm.wait()
        return alarm

    def _wait(self, alarm: Alarm) -> bool:
        """Whether the clock stands; it tells the alarm when it goes on."""
        if self._stopped_at is None:
            return False
        self._waiting.add(alarm)
        return True

    def _forget(self, alarm: Alarm) -> None:
        self._waiting.discard(alarm)


class Alarm:
    """One call in the future of a clock."""

    __slots__ = ("_at", "_clock", "_ring", "_timer")

    def __init__(self, clock: Clock, at: float, ring: Callable[[], object]) -> None:
        self._clock, self._at, self._ring = clock, at, ring
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        self._clock._forget(self)
        if self._timer is not None:
            self._timer.cancel()

    def wait(self) -> None:
        if not self._clock._wait(self):
            left = max(0.0, self._at - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(left, self._try)

    def _try(self) -> None:
        if self._clock.now() < self._at:  # it stood still meanwhile
            self.wait()
        else:
            self._ring()


@asynccontextmanager
async def within(clock: Clock, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, by `clock`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as deadline:
        alarm = None if seconds is None else clock.alarm(seconds, lambda: deadline.reschedule(loop.time()))
        try:
            yield deadline
        finally:
            if alarm is not None:
                alarm.cancel()
