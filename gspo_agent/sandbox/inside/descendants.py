"""Processes below another one, where no pid namespace holds them together."""

from __future__ import annotations

import os
import signal


def count_threads(pids: list[str]) -> int:
    count = 0
    for pid in pids:
        try:
            count += os.stat(f"/proc/{pid}/task").st_nlink - 2
        except OSError:
            continue
    return count


def of(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found, waiting = set(), [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def tell(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def end_all() -> None:
    """What a killed server leaves: whoever was forked just before, and had not asked yet to end with its parent, goes
    on."""
    while True:
        for pid in of(os.getpid()):
            tell(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def wait_for_all() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
