"""A program's three standard streams."""

from __future__ import annotations

import fcntl
import os

_USUAL = 1 << 14  # bytes of output, at most, that one system call suffices for
SEALS = 0xF  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE


class Streams:
    """Standard input as a sealed memory file; standard output and error as memory files that the file-size limit caps:
    nothing has to be pumped while the program runs, and nothing can block on a full pipe.

    With `shared`, both outputs are one file, in the order of writing.
    """

    def __init__(self, stdin: bytes | memoryview = b"", *, shared: bool = False) -> None:
        source = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        view = memoryview(stdin)
        while view:
            view = view[os.write(source, view) :]
        fcntl.fcntl(source, fcntl.F_ADD_SEALS, SEALS)
        # Reopened, so that the program gets a file offset of its own and no right to write.
        self.stdin = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(source)
        self.stdout = _appending("stdout")
        self.stderr = self.stdout if shared else _appending("stderr")
        self._late, self._taken = b"", 0

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.stdin, self.stdout, self.stderr

    def full(self, limit: int) -> bool:
        """Whether the cap on one of the outputs was reached."""
        return any(os.fstat(fd).st_size >= limit for fd in (self.stdout, self.stderr))

    def read(self, limit: int) -> list[bytes]:
        """Standard output and standard error."""
        return [os.pread(fd, min(os.fstat(fd).st_size, limit), 0) for fd in (self.stdout, self.stderr)]

    def take(self, limit: int) -> bytes:
        """What was written to the shared output since the last time; `rewind` is to follow."""
        late, data = self._late, self._shared_from(0, limit)
        self._late, self._taken = b"", len(data)
        return late + data

    def rewind(self, limit: int) -> None:
        """Empties the shared output; what was written to it since `take` is kept for the next one."""
        self._late = self._shared_from(self._taken, limit)
        if self._taken or self._late:
            os.ftruncate(self.stdout, 0)

    def _shared_from(self, start: int, limit: int) -> bytes:
        data = os.pread(self.stdout, min(_USUAL, limit), start)
        if len(data) == _USUAL:
            more = max(0, os.fstat(self.stdout).st_size - start)  # it may have been cut off
            data = os.pread(self.stdout, min(more, limit), start)
        return data

    def drain(self, limit: int) -> list[bytes]:
        """What was written to standard output and to standard error since the last time."""
        written = self.read(limit)
        for fd, data in zip((self.stdout, self.stderr), written, strict=True):
            if data:
                os.ftruncate(fd, 0)
        return written

    def close(self) -> None:
        for fd in set(self.fds):
            os.close(fd)


def _appending(name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd
