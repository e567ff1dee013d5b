"""What a sandbox may leave behind: nothing."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gspo_agent.sandbox.forkserver import ForkServer
from tests.faults.disk import SMALL_DISK


@dataclass(frozen=True)
class Traces:
    """What this process can see of jobs: descriptors, mounts, files in the temporary directory, processes."""

    descriptors: int
    mounts: str
    files: frozenset[str]


def traces() -> Traces:
    """Without the disks of a fault campaign that may be running beside these tests."""
    return Traces(
        len(os.listdir("/proc/self/fd")),
        "\n".join(line for line in Path("/proc/self/mounts").read_text().splitlines() if line.split()[0] != SMALL_DISK),
        frozenset(name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("box", "gspo"))),
    )


def children() -> dict[int, set[int]]:
    """Of every process that has some, those that have not ended."""
    found: dict[int, set[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found.setdefault(int(fields[1]), set()).add(pid)
    return found


def descendants(root: int) -> set[int]:
    """Every process below `root`, and itself."""
    below, found, queue = children(), {root}, [root]
    while queue:
        more = below.get(queue.pop(), set())
        found |= more
        queue += more
    return found


def chain(started: ForkServer) -> list[int]:
    """The launcher, the first process in the outer namespaces where there are any, and the server."""
    below, found = children(), [started.pid]
    for _ in range(2 if started.backend == "ns" else 1):
        (only,) = below[found[-1]]
        found.append(only)
    return found


def server_of(started: ForkServer) -> int:
    """The parent of all supervisors."""
    return chain(started)[-1]


def supervisors(started: ForkServer) -> set[int]:
    return children().get(server_of(started), set())


def programs(started: ForkServer) -> set[int]:
    """Every process of a job; its supervisor is none, and may wait for another job."""
    above = supervisors(started)
    return set().union(*map(descendants, above)) - above


def alive(pids: set[int]) -> set[int]:
    """Those that still run; waits a moment for the kernel to finish with the others."""
    deadline = time.monotonic() + 10
    while True:
        running = {pid for pid in pids if not gone(pid)}
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether it has ended, though nobody may have buried it yet."""
    return _state(pid) in ("", "Z", "X")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
