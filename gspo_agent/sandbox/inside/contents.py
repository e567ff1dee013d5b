"""What comes with a run and what it printed, on their way through its supervisor.

The next program on the same supervisor is a fork of it and may search all of its memory. So nothing of this is ever
made an object of Python: it lies in mappings that go with the run, private ones, as a shared one would be the next
program's to read and this one's to write to.
"""

from __future__ import annotations

import fcntl
import json
import marshal
import mmap
import os
import socket
import types
from collections.abc import Sequence
from typing import Any

from .frames import LENGTH, parts, receive_length
from .streams import SEALS

_MOST_COMPILED = 1 << 22  # bytes


class Request:
    """A frame from the trainer. `close` leaves nothing of its blobs in this process."""

    def __init__(self, channel: socket.socket) -> None:
        """Waits for it; EOFError when the other side is gone."""
        self._memory = _Memory(receive_length(channel))
        self._memory.fill(channel)
        header, *self.blobs = parts(self._memory.view)
        self.header: dict[str, Any] = json.loads(bytes(header)) if header else {}
        header.release()

    def close(self) -> None:
        for blob in self.blobs:
            blob.release()
        self._memory.close()


class Compiled:
    """A batch's code as its first program has compiled it, for those after it.

    That program writes it down and closes the file before any of the code runs. The others have a private mapping of
    the sealed file, and load it before any of the code runs: nothing of the code can change what is loaded.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes that a program may write to a file."""
        self._most = min(most, _MOST_COMPILED)
        self._file: int | None = os.memfd_create("compiled", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._memory: mmap.mmap | None = None

    @property
    def file(self) -> int | None:
        """For the first program."""
        return self._file

    def seal(self) -> None:
        """After the first program."""
        if self._file is None:
            return
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        size = os.fstat(self._file).st_size
        if size > LENGTH.size:
            self._memory = mmap.mmap(self._file, size, mmap.MAP_PRIVATE, mmap.PROT_READ)
            if LENGTH.unpack_from(self._memory)[0] != size - LENGTH.size:  # it was killed in the middle
                self._memory = None
        os.close(self._file)
        self._file = None

    def save(self, code: types.CodeType, file: int) -> None:
        """In the first program, to whose `file` this goes."""
        data = marshal.dumps(code)
        if len(data) + LENGTH.size <= self._most:
            os.write(file, LENGTH.pack(len(data)) + data)

    def load(self) -> types.CodeType | None:
        """In the others."""
        if self._memory is None:
            return None
        with memoryview(self._memory) as data:
            code: types.CodeType = marshal.loads(data[LENGTH.size :])
        return code

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._memory:
            self._memory.close()


def relay(channel: socket.socket, header: dict[str, Any], files: Sequence[int], limit: int) -> None:
    """Sends a frame with at most `limit` bytes of each of the open files as its blobs."""
    sizes = [min(os.fstat(file).st_size, limit) for file in files]
    encoded = json.dumps(header).encode()
    memory = _Memory(LENGTH.size * (2 + len(files)) + len(encoded) + sum(sizes))
    view, position = memory.view, LENGTH.size
    LENGTH.pack_into(view, 0, len(view) - position)
    LENGTH.pack_into(view, position, len(encoded))
    position += LENGTH.size
    view[position : position + len(encoded)] = encoded
    position += len(encoded)
    for file, size in zip(files, sizes, strict=True):
        LENGTH.pack_into(view, position, size)
        position += LENGTH.size
        with view[position : position + size] as place:
            os.preadv(file, [place], 0)
        position += size
    channel.sendall(view)
    memory.close()


class _Memory:
    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._mapping)[:size]

    def fill(self, channel: socket.socket) -> None:
        done = 0
        while done < len(self.view):  # a signal may cut MSG_WAITALL short
            with self.view[done:] as rest:
                more = channel.recv_into(rest, 0, socket.MSG_WAITALL)
            if not more:
                raise EOFError("the other side closed the channel")
            done += more

    def close(self) -> None:
        self.view.release()
        self._mapping.close()
