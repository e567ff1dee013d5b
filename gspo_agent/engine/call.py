"""One request of an engine, from the moment it is made until its reply: where it is, and how it is ended."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo_agent.engine.stream import Stream
    from gspo_agent.engine.worker import Worker

_PROCESS = secrets.token_hex(4)
_numbers = itertools.count()


def escaped(prefix: str) -> str:
    """What the names of all requests begin with whose id begins with `prefix`."""
    return prefix.replace("~", "~~")


class Call:
    """Is asked for by one `generate`. Others may end it at any time, wherever it is."""

    __slots__ = (
        "_due", "_flight", "_limit", "_mark", "_waiter", "aborted", "asked", "id", "over", "rid", "session", "stream",
        "tries", "worker",
    )  # fmt: skip

    def __init__(self, request_id: str, limit: float | None) -> None:
        """`limit`: seconds that one try may take."""
        self.id = request_id
        self.session = request_id.rpartition("-")[0] or request_id
        """What requests of one episode have in common."""
        self.rid = ""
        """Its name at the server, another for each try."""
        self.tries = 0
        self.aborted = self.over = False
        self.worker: Worker | None = None
        """Where it is in flight."""
        self.asked = 0
        """The most tokens that this try may bring."""
        self.stream: Stream | None = None
        """What this try has brought so far, where that is told."""
        self._limit, self._mark = limit, f"{_PROCESS}{next(_numbers):x}"
        self._flight: asyncio.Timeout | None = None
        self._due: float | None = None
        """When the time of this try is over."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def sampled(self) -> int:
        """Tokens so far, or all that may be, where nobody tells. From any thread."""
        stream = self.stream
        if self.worker is None:
            return 0
        return self.asked if stream is None else len(stream)

    def next_rid(self) -> str:
        """A name that no other begins with, since servers abort by prefix: a single "~" is in none but at its end. A
        server may still have a request of the same id, of a call that was cancelled or a process that died."""
        self.tries += 1
        self.rid = f"{escaped(self.id)}~{self._mark}.{self.tries}~"
        return self.rid

    def abort(self, grace: float) -> None:
        """It is to end with what it has, within `grace` seconds if it is in flight."""
        self.aborted = True
        self.wake()
        self._end_within(grace)

    def cut(self) -> None:
        """Its reply is not waited for any longer; it is asked for again."""
        self._end_within(0.0)

    def hold(self, held: bool) -> None:
        """While it is held, its time does not run."""
        self._due = None if held or self._limit is None else self._now() + self._limit

    def look(self, now: float) -> None:
        """Ends a try whose time is over; to be called every now and then. A timer of its own for every try would cost
        as much as sending it."""
        if self._due is not None and now >= self._due and not self.aborted:
            self.cut()

    def flight(self, *, held: bool) -> asyncio.Timeout:
        """Around one try: TimeoutError where its time is over, or it was cut."""
        self.hold(held)
        self._flight = asyncio.timeout(None)
        return self._flight

    def landed(self) -> None:
        self._flight = self._due = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Returns when somebody wakes it, or after so many seconds."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((self._waiter,), timeout=seconds)
        finally:
            self._waiter = None

    def _end_within(self, seconds: float) -> None:
        if self._flight is not None and not self._flight.expired():
            self._flight.reschedule(self._now() + seconds)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
