"""Jobs played in the fork server before there are any: what a supervisor does, and how a program gets ready.

What Python writes down while code runs for the first times (specialised instructions, caches of types, counts of
references) lies in pages that every job would otherwise have to copy for itself: that was a seventh of a job's cost.
Another seventh were the gaps that imports leave all over the memory, in which jobs would put what they make.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Any

from . import frames, linux, namespaces, program, supervisor

_TIMES = 12  # the interpreter specialises what has run about ten times
_CODE = b"import sys\ndef f(x):\n    return x\nfor n in range(3):\n    print(f(n), sys.maxsize, 'x'[::-1])\n"
_POOL = 1 << 14  # bytes that Python's allocator takes at a time, for objects of one size
_POOL_HEAD = 48
_SIZES = range(16, 513, 16)  # of the objects that it places
_BYTES_HEAD = sys.getsizeof(b"")
_MOST = 2_000  # objects of one size, where they are never side by side
_LIMITS = {
    "cpu_s": 5.0, "wall_s": 15.0, "memory_bytes": 1 << 30, "address_space_bytes": 1 << 33, "output_bytes": 1 << 20,
    "result_bytes": 1 << 20, "disk_bytes": 1 << 20, "files": 9, "processes": 1 << 20, "open_files": 64,
    "stack_bytes": 1 << 23,
}  # fmt: skip


def rehearse(*, own_ids: bool) -> None:
    """`own_ids`: whether jobs have ids of their own."""
    for _ in range(_TIMES):
        near, far = socket.socketpair()
        far.sendall(frames.pack({"kind": "run", "limits": _LIMITS}, b"", b"", b""))
        far.shutdown(socket.SHUT_WR)
        supervisor.supervise(near, _Stage(own_ids))
        near.close()
        far.close()
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        _confine(own_ids)
        program.execute(_CODE)  # and not its end: exit handlers and `threading` have theirs only once
        sys.stdout.flush()


def _confine(own_ids: bool) -> None:
    """All of it that leaves this process what it is."""
    stage, capabilities = _Stage(own_ids), linux.capabilities()
    limits = [(resource.RLIMIT_CORE, 0)] * len(_LIMITS)
    program.confine(limits, stage, (0, 1, 2), None, whole_run=True, last_fd=program.KEPT_FD, capabilities=capabilities)
    program.become_harness_again(stage.work)


def fill_gaps() -> list[object]:
    """Objects that leave no gap in the memory as long as they live: the next ones will be side by side."""
    return [filler for size in _SIZES for filler in _fillers(size)]


def _fillers(size: int) -> Iterator[object]:
    """Until they have filled a whole pool, one after the other."""
    last = in_a_row = 0
    for number in range(_MOST):
        filler: object = object() if size == 16 else number + 0.5 if size == 32 else bytes(size - _BYTES_HEAD)
        yield filler
        in_a_row = in_a_row + 1 if id(filler) - last == size else 0
        last = id(filler)
        if in_a_row >= (_POOL - _POOL_HEAD) // size - 2:
            return


class _Stage:
    """No walls: the programs of a rehearsal are empty."""

    work, own_count = "/", False

    def __init__(self, changes_id: bool) -> None:
        self._changes_id = changes_id

    def build(self, limits: dict[str, Any]) -> None: ...
    def renew(self) -> None: ...
    def started(self, pid: int) -> None: ...
    def enter(self) -> None: ...
    def lose_identity(self) -> None:
        if self._changes_id and not os.getgroups():
            namespaces.take_slot(os.geteuid())

    def lock(self) -> None: ...
    def signal(self, number: int) -> None: ...
    def close(self) -> None: ...

    def vacate(self) -> bool:
        return True

    def processes(self) -> list[str]:
        return [str(os.getpid())]

    def newest(self) -> int:
        return 0

    def overdrawn(self) -> bool:
        return False
