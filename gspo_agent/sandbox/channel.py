"""A job's channel in an event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Self

from gspo_agent.sandbox.inside import frames

_CHUNK = 1 << 16


class JobLost(Exception):
    """The supervisor is gone: the fork server died, or the machine took the job away."""


class Channel:
    """Frames to and from a job's supervisor. Closing it ends the job and everything in it.

    What arrives is kept from the first `receive` on, until another event loop calls that.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._incoming = frames.Incoming()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._ended = False

    async def send(self, header: dict[str, Any], *blobs: bytes) -> None:
        data = frames.pack(header, *blobs)
        try:
            sent = self._socket.send(data) if len(data) <= _CHUNK else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            raise JobLost from None
        if sent == len(data):
            return
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, memoryview(data)[sent:])
        except OSError:
            raise JobLost from None

    async def receive(self, timeout_s: float) -> tuple[dict[str, Any], list[bytes]]:
        """Waits for one frame; JobLost when the job is gone or answers nothing in `timeout_s`."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + timeout_s
        try:
            while (frame := self._incoming.take()) is None:
                await self._more(loop)
        except OSError:
            raise JobLost from None
        return frames.unpack(frame)

    async def _more(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ended:
            raise JobLost
        if loop is not self._loop:
            self._stop_reading()
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._read)
        if self._alarm is None or self._alarm.when() > self._deadline:
            self._watch(loop)
        self._waiter = loop.create_future()
        await self._waiter

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = loop.call_at(self._deadline, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """One alarm serves many frames: it looks at the last one's deadline when it goes off, as nearly none does."""
        self._alarm = None
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() < self._deadline:
            self._watch(loop)
        else:
            self._end()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._incoming.add(data)
            self._wake()
        else:
            self._end()

    def _end(self) -> None:
        """Nothing more will arrive, or be waited for."""
        self._ended = True
        self._stop_reading()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        if self._alarm is not None:
            self._alarm.cancel()
        self._loop = self._alarm = None

    def detach(self) -> socket.socket | None:
        """The connection, for another channel; None where this one has ended, or holds what nobody has received."""
        self._stop_reading()
        return None if self._ended or self._incoming else self._socket

    def close(self) -> None:
        self._stop_reading()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
