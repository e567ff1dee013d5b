"""Run as a job when the sandbox starts: tries what a job must not be able to do and prints, as JSON, what it could do.

Standard input: a list of paths that must not exist here.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import socket
import sys
from collections.abc import Callable

_ENVIRONMENT = {"PATH", "HOME", "TMPDIR", "USER", "LANG", "OMP_NUM_THREADS"}
_CLONE_NEWUSER, _MS_REMOUNT_BIND, _PTRACE_ATTACH = 0x10000000, 32 | 4096, 16


def breaches(secrets: list[str]) -> list[str]:
    """Every attempt that succeeded."""
    libc = ctypes.CDLL(None, use_errno=True)
    attempts: dict[str, Callable[[], object]] = {
        "a network socket opened": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
        "a unix socket opened": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close(),
        "the supervisor's memory opened": lambda: open("/proc/1/mem", "rb").close(),
        "the interpreter's library was writable": lambda: open(os.__file__, "ab").close(),
        "the root directory was writable": lambda: open("/escape", "wb").close(),
        "the process limit could be raised": lambda: resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)),
    }
    found = [name for name, attempt in attempts.items() if _succeeds(attempt)]
    calls: dict[str, Callable[[], object]] = {
        "a user namespace was made": lambda: libc.unshare(_CLONE_NEWUSER),
        "a file system was mounted": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "a mount was made writable": lambda: libc.mount(None, b"/", None, _MS_REMOUNT_BIND, None),
        "the supervisor could be traced": lambda: libc.ptrace(_PTRACE_ATTACH, 1, 0, 0),
        "the root directory was changed": lambda: libc.chroot(b"/box"),
        "the user could become root": lambda: libc.setuid(0),
    }
    found += [name for name, call in calls.items() if call() == 0]
    found += [
        f"{path} is not mounted read-only"
        for path in ("/", os.__file__, sys.executable)
        if not os.statvfs(path).f_flag & os.ST_RDONLY
    ]
    found += [f"{path} is visible" for path in secrets if os.path.lexists(path)]
    found += [
        f"the variable {name} is visible"
        for name in os.environ
        if name not in _ENVIRONMENT and "PYTHON" not in name and "MALLOC" not in name
    ]
    found += [f"descriptor {fd} was inherited" for fd in range(3, 64) if _succeeds(functools.partial(os.fstat, fd))]
    found += [f"process {pid} is visible" for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    return found + _privileges()


def _privileges() -> list[str]:
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    found = []
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        if int(status[name], 16):
            found.append(f"{name} is {status[name]}")
    if status["NoNewPrivs"] != "1":
        found.append("no_new_privs is off")
    if status["Seccomp"] != "2":
        found.append("no system-call filter is installed")
    return found


def _succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(breaches(json.load(sys.stdin))))
