"""Messages on a stream socket: a JSON header and any number of byte strings."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct(">I")
MAX_FRAME = 1 << 30


def pack(header: dict[str, Any], *blobs: bytes) -> bytes:
    """[u32 length of the rest][u32 length of the header][header][blobs]; the header carries the blobs' sizes."""
    head = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    body = b"".join((LENGTH.pack(len(head)), head, *blobs))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the blobs of a frame without its first length."""
    (size,) = LENGTH.unpack_from(body)
    position = LENGTH.size + size
    header = json.loads(body[LENGTH.size : position])
    blobs = []
    for length in header.pop("sizes"):
        blobs.append(body[position : position + length])
        position += length
    return header, blobs


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Waits for one frame; EOFError when the other side is gone."""
    (length,) = LENGTH.unpack(exactly(channel, LENGTH.size))
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes is above {MAX_FRAME}")
    return unpack(exactly(channel, length))


def exactly(channel: socket.socket, length: int) -> bytes:
    """Waits for `length` bytes."""
    data = channel.recv(length, socket.MSG_WAITALL) if length else b""
    while len(data) < length:  # a signal may cut MSG_WAITALL short
        more = channel.recv(length - len(data))
        if not more:
            raise EOFError("the other side closed the channel")
        data += more
    return data
