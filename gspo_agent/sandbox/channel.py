"""A job's channel in an event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Self

from gspo_agent.sandbox.inside import frames

_CHUNK = 1 << 18


class JobLost(Exception):
    """The supervisor is gone: the fork server died, or the machine took the job away."""


class Channel:
    """Frames to and from a job's supervisor. Closing it ends the job and everything in it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._buffer = bytearray()

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
        try:
            async with asyncio.timeout(timeout_s):
                (length,) = frames.LENGTH.unpack(await self._exactly(frames.LENGTH.size))
                return frames.unpack(await self._exactly(length))
        except (OSError, TimeoutError):
            raise JobLost from None

    async def _exactly(self, length: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._buffer) < length:
            data = await loop.sock_recv(self._socket, _CHUNK)
            if not data:
                raise JobLost
            self._buffer += data
        taken = bytes(self._buffer[:length])
        del self._buffer[:length]
        return taken

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
