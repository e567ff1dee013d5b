"""An engine whose time is simulated, and the clock that moves it: the rest of the process is the real one.

The clock is the event loop's selector. A loop that asks it to wait has nothing left to do; once the journal and every
other thread have come to rest as well, simulated time goes on to the next event, and that event's future is done. So
one event follows the other, however fast the machine is and whatever its threads do, and a seed gives the same numbers
every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gspo_agent.engine.base import Completion, FinishReason, Sampling, Weights
from gspo_agent.rollout.journal import Journal
from gspo_agent.testing import ByteChat
from gspo_agent.trajectory import Segment

_PATIENCE = 60.0  # seconds of the real clock
FILL = ByteChat.TOOLS
"""What turns are made of: to ByteChat no text, so that no message grows with the length of its turn."""


class Clock(selectors.DefaultSelector):
    """Simulated time in ticks: in one, every running request gets one token.

    >>> clock = Clock()
    >>> with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner: ...
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.journal: Journal | None = None
        """What has to come to rest before time goes on; the one that is open."""
        self.engine: SimulatedEngine | None = None
        self._alarms: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._others = set(threading.enumerate())

    async def sleep(self, ticks: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._alarms, (self.now + ticks, next(self._numbers), future))
        await future

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._wait_for_threads()
        events = super().select(0)
        if events:  # a thread has something for the loop
            return events
        return super().select(0 if self._go_on() else timeout)

    def _wait_for_threads(self) -> None:
        """Returns when what they had to do is done and told to the loop; nobody but the idle loop gives them more."""
        for thread in threading.enumerate():
            if thread not in self._others and thread.name != "journal":
                thread.join(_PATIENCE)
                if thread.is_alive():
                    raise RuntimeError(f"thread {thread.name!r} stays: whether it is at rest cannot be told")
        if self.journal is not None:
            self.journal.flush()
            while self.journal.writes:  # those of the last transaction are told after it
                time.sleep(0)

    def _go_on(self) -> bool:
        """Moves to the next event and lets it happen; False where there is none."""
        engine_ticks = None if self.engine is None else self.engine.next_end()
        alarm_ticks = self._alarms[0][0] - self.now if self._alarms else None
        ticks = min((t for t in (alarm_ticks, engine_ticks) if t is not None), default=None)
        if ticks is None:
            return False
        if self.engine is not None:
            self.engine.advance(ticks)
        self.now += ticks
        if ticks == alarm_ticks:
            heapq.heappop(self._alarms)[2].set_result(None)
        elif self.engine is not None:
            self.engine.end_first()
        return True


@dataclass(eq=False, slots=True)
class Request:
    """One `generate` on its way."""

    id: str
    rank: tuple[int, int]
    """Tick at which it came, and the seed of its episode: the order among equals."""
    left: int
    """Tokens until it ends."""
    finish_reason: FinishReason
    future: asyncio.Future[Completion]
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, tokens sampled under it)"""


class SimulatedEngine:
    """Implements `gspo_agent.engine.base.Engine`: a fixed number of slots, a queue before them, and one token per tick
    of `clock` in every slot that is taken. It samples single turns, whose length depends on the episode's seed alone.
    """

    name = "policy"
    vocab_size = ByteChat.vocab_size
    turn = contextlib.nullcontext()

    def __init__(self, clock: Clock, slots: int, length: Callable[[int], int], context_tokens: int) -> None:
        """
        Args:
            length: Seed of the episode -> tokens of its turn, the stop token among them.
        """
        self.slots, self.length, self.context_tokens = slots, length, context_tokens
        self.weight_version = 0
        self.sampled = 0
        """Tokens, all together."""
        self.occupancy: list[tuple[int, int]] = []
        """(tick, slots that sample from then on), one for each change."""
        self._clock = clock
        self._paused = False
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        clock.engine = self

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        assert sampling.seed is not None
        begun = len(token_ids) - token_ids.index(ByteChat.ASSISTANT) - 1
        left = self.length(sampling.seed) - begun
        reason: FinishReason = "stop" if left <= sampling.max_new_tokens else "length"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        rank = (self._clock.now, sampling.seed)
        self._waiting.append(Request(request_id, rank, min(left, sampling.max_new_tokens), reason, future))
        return await future

    async def abort(self, request_id: str) -> None:
        for request in (*self._running, *self._waiting):
            if request.id == request_id:
                request.finish_reason = "abort"
                self._end(request)

    async def clear(self, prefix: str) -> None:
        for request in (*self._running, *self._waiting):
            if request.id.startswith(prefix):
                await self.abort(request.id)

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False

    async def update_weights(self, weights: Weights) -> None:
        self.weight_version = weights.version

    async def close(self) -> None:
        return None

    # ---- called by the clock, when everything else is at rest

    def next_end(self) -> int | None:
        """Lets in those that wait; ticks until the next request ends, None where none will."""
        self._waiting.sort(key=lambda request: request.rank)
        free = self.slots - len(self._running)
        self._running += self._waiting[:free]
        del self._waiting[:free]
        return min((request.left for request in self._sampling), default=None)

    def advance(self, ticks: int) -> None:
        if not ticks:
            return
        busy = len(self._sampling)
        if not self.occupancy or self.occupancy[-1][1] != busy:
            self.occupancy.append((self._clock.now, busy))
        self.sampled += ticks * busy
        for request in self._sampling:
            request.left -= ticks
            before = request.spans.pop() if request.spans else (self.weight_version, 0)
            if before[0] != self.weight_version:
                request.spans.append(before)
                before = (self.weight_version, 0)
            request.spans.append((before[0], before[1] + ticks))

    def end_first(self) -> None:
        """Ends one request that has no token left to sample."""
        self._end(min(self._sampling, key=lambda request: (request.left, request.rank)))

    @property
    def _sampling(self) -> list[Request]:
        return [] if self._paused else self._running

    def _end(self, request: Request) -> None:
        (self._running if request in self._running else self._waiting).remove(request)
        segments = [
            Segment(np.full(tokens, FILL), self.name, np.zeros(tokens), version) for version, tokens in request.spans
        ]
        if request.finish_reason == "stop":
            segments[-1].token_ids[-1] = ByteChat.END
        request.future.set_result(Completion(tuple(segments), request.finish_reason))
