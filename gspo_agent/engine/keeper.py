"""Runs one server and ends its whole process tree: when the server ends, and when whoever asked for it does.

    python keeper.py DESCRIPTOR DIRECTORY COMMAND ...

DESCRIPTOR is one end of a socket; the tree ends when the other one is closed, however that came about. DIRECTORY, which
has the tree's temporary files, is removed when the last process is gone. A process of its
own and of the standard library alone, since `kill -9` leaves nobody else to do it. What the server's processes start
becomes the keeper's when they die (PR_SET_CHILD_SUBREAPER), so nothing gets out of its sight, and its end is that of
the last of them. It exits with the server's status, 128 and the signal's number for one that a signal ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_LOOK_MILLISECONDS = 1000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(descriptor: int, directory: str, command: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper, server = os.getpid(), os.fork()
    if server == 0:
        _become(command, keeper, prctl)
    threading.Thread(target=_end_with, args=(descriptor, server), daemon=True).start()
    while (ended := os.wait())[0] != server:
        pass
    status = os.waitstatus_to_exitcode(ended[1])
    _end_all()
    shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _become(command: list[str], keeper: int, prctl: Callable[..., int]) -> None:
    """The server; it ends with the keeper."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _end_with(descriptor: int, server: int) -> None:
    """Waits until the other end of the socket is closed, or its process is gone and a child of that still has it."""
    closed, parent = select.poll(), os.getppid()
    closed.register(descriptor, select.POLLRDHUP)
    while not closed.poll(_LOOK_MILLISECONDS) and os.getppid() == parent:
        pass
    with suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)


def _end_all() -> None:
    """Kills and reaps all descendants, also those that are born meanwhile."""
    while True:
        for pid in _descendants(os.getpid()):
            with suppress(OSError):  # it has ended, or belongs to somebody else
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        todo += (new := children.get(todo.pop(), []))
        found += new
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
