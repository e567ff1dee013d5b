"""What a request passes before it reaches the scheduler: the pause, and the lock that a weight update holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Requests pass together, an update alone; an update that waits keeps new requests out."""

    def __init__(self) -> None:
        self.paused = False
        self.pausing = asyncio.Condition()
        """Held while a pause is entered or left."""
        self.inside = 0
        self._writers = 0
        self._writing = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Waits for the end of a pause and of every update that came before."""
        async with self.pausing:
            await self.pausing.wait_for(lambda: not self.paused)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._writing and not self._writers)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """In a pause at once; otherwise when every request that is inside has ended."""
        if self.paused:
            yield
            return
        async with self._changed:
            self._writers += 1
            try:
                await self._changed.wait_for(lambda: not self._writing and not self.inside)
                self._writing = True
            finally:
                self._writers -= 1
        try:
            yield
        finally:
            self._writing = False
            async with self._changed:
                self._changed.notify_all()
