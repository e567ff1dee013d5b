"""Messages on a stream socket: a JSON header and any number of byte strings."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, TypeVar

LENGTH = struct.Struct(">I")
SPENT = struct.Struct(">?dd")  # of a cell: whether its session lives, seconds of CPU, seconds on the clock
MAX_FRAME = 1 << 30
IDLE_S = 5  # that a supervisor waits for another request
_CHUNK = 1 << 16
Body = TypeVar("Body", bytes, memoryview)


def pack(header: dict[str, Any], *blobs: bytes) -> bytes:
    """[u32 length of the rest], then the header and each blob as [u32 length][bytes]; an empty header is no bytes."""
    parts = [b""]
    for part in (json.dumps(header).encode() if header else b"", *blobs):
        parts += LENGTH.pack(len(part)), part
    parts[0] = LENGTH.pack(sum(map(len, parts)))
    return b"".join(parts)


def unpack(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the blobs of a frame without its first length."""
    header, *blobs = parts(body)
    return json.loads(header.decode()) if header else {}, blobs


def parts(body: Body) -> list[Body]:
    """Of a frame without its first length: the encoded header and the blobs."""
    found, position = [], 0
    while position < len(body):
        (length,) = LENGTH.unpack_from(body, position)
        position += LENGTH.size + length
        found.append(body[position - length : position])
    return found


class Incoming:
    """Frames of a stream, however its bytes are cut. One that came whole has cost one system call."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __bool__(self) -> bool:
        """Whether something has come that was not taken."""
        return bool(self._bytes)

    def add(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> bytes | None:
        """The first one, without its length, where all of it has arrived."""
        if len(self._bytes) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._bytes)
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes is above {MAX_FRAME}")
        end = LENGTH.size + length
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[LENGTH.size : end])
        del self._bytes[:end]
        return frame

    def wait(self, channel: socket.socket) -> bytes:
        """The first one, as soon as it is there; EOFError when the other side is gone."""
        while (frame := self.take()) is None:
            data = channel.recv(_CHUNK)
            if not data:
                raise EOFError("the other side closed the channel")
            self.add(data)
        return frame


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Waits for one frame, and takes nothing of what follows; EOFError when the other side is gone."""
    return unpack(exactly(channel, receive_length(channel)))


def receive_length(channel: socket.socket) -> int:
    """Of what follows it, and is the rest of the frame."""
    length = int(LENGTH.unpack(exactly(channel, LENGTH.size))[0])
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes is above {MAX_FRAME}")
    return length


def exactly(channel: socket.socket, length: int) -> bytes:
    """Waits for `length` bytes."""
    data = channel.recv(length, socket.MSG_WAITALL) if length else b""
    while len(data) < length:  # a signal may cut MSG_WAITALL short
        more = channel.recv(length - len(data))
        if not more:
            raise EOFError("the other side closed the channel")
        data += more
    return data
