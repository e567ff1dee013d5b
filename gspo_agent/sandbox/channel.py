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
        self._buffer = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
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
        patience = asyncio.get_running_loop().call_later(timeout_s, self._end)
        try:
            while (frame := self._frame()) is None:
                await self._more()
        except OSError:
            raise JobLost from None
        finally:
            patience.cancel()
        return frames.unpack(frame)

    def _frame(self) -> bytes | None:
        """The first one, without its length, where all of it has arrived."""
        start = frames.LENGTH.size
        if len(self._buffer) < start:
            return None
        end = start + frames.LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[start:end])
        del self._buffer[:end]
        return frame

    async def _more(self) -> None:
        if self._ended:
            raise JobLost
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._stop_reading()
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._read)
        self._waiter = loop.create_future()
        await self._waiter

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._buffer += data
        if data:
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
        self._loop = None

    def close(self) -> None:
        self._stop_reading()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
