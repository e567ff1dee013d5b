"""Run as a job when the sandbox starts: tries what a job must not be able to do and prints, as JSON, what it could do.

Standard input: {"secrets": paths that must not exist here (`ns`) or not be readable, "canary": a file that may be read
and must stay as it is, or null}.
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
_PR_GET_SECCOMP, _PR_GET_NO_NEW_PRIVS, _CAPABILITIES_V3 = 21, 39, 0x20080522


def breaches(secrets: list[str], canary: str | None) -> list[str]:
    """Every attempt that succeeded."""
    found = _common()
    return found + (_among_processes(secrets, canary) if canary else _in_namespaces(secrets))


def _common() -> list[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    attempts: dict[str, Callable[[], object]] = {
        "a network socket opened": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
        "a unix socket opened": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close(),
        "the supervisor's memory opened": lambda: open(f"/proc/{os.getppid()}/mem", "rb").close(),
        "the interpreter's library was writable": lambda: open(os.__file__, "ab").close(),
        "the root directory was writable": lambda: open("/escape", "wb").close(),
        "a limit could be raised": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6)),
        "a datagram socket opened": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].close(),
    }
    found = [name for name, attempt in attempts.items() if _succeeds(attempt)]
    calls: dict[str, Callable[[], object]] = {
        "a user namespace was made": lambda: libc.unshare(_CLONE_NEWUSER),
        "a file system was mounted": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "a mount was made writable": lambda: libc.mount(None, b"/", None, _MS_REMOUNT_BIND, None),
        "the supervisor could be traced": lambda: libc.ptrace(_PTRACE_ATTACH, os.getppid(), 0, 0),
        "the root directory was changed": lambda: libc.chroot(b"."),
        "the user could become root": lambda: libc.setuid(0),
    }
    found += [name for name, call in calls.items() if call() == 0]
    found += [
        f"the variable {name} is visible"
        for name in os.environ
        if name not in _ENVIRONMENT and "PYTHON" not in name and "MALLOC" not in name
    ]
    found += [f"descriptor {fd} was inherited" for fd in range(3, 64) if _succeeds(functools.partial(os.fstat, fd))]
    return found + _privileges()


def _in_namespaces(secrets: list[str]) -> list[str]:
    found = [
        f"{path} is not mounted read-only"
        for path in ("/", os.__file__, sys.executable)
        if not os.statvfs(path).f_flag & os.ST_RDONLY
    ]
    found += [f"{path} is visible" for path in secrets if os.path.lexists(path)]
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    return found + [f"process {pid} is visible" for pid in others]


def _among_processes(secrets: list[str], canary: str) -> list[str]:
    parent = os.getppid()
    attempts: dict[str, Callable[[], object]] = {
        "another process was made": _fork,
        "another program could be run": _execute,
        "the supervisor could be signalled": lambda: os.kill(parent, 0),
        "a handle of the supervisor opened": lambda: os.close(os.pidfd_open(parent)),
        "processes could be listed": lambda: os.listdir("/proc"),
        "another job's directory could be listed": lambda: os.listdir(os.path.dirname(canary)),
        "a file was cut off": lambda: os.close(os.open(canary, os.O_RDONLY | os.O_TRUNC)),
        "a file was truncated": lambda: os.truncate(canary, 0),
        "a file's mode was changed": lambda: os.chmod(canary, 0o666),
        "a file's times were changed": lambda: os.utime(canary),
        "a file was moved": lambda: os.rename(canary, "canary"),
        "a file was linked": lambda: os.link(canary, "canary"),
        "a file was removed": lambda: os.unlink(canary),
    }
    found = [name for name, attempt in attempts.items() if _succeeds(attempt)]
    return found + [f"{path} is readable" for path in secrets if _succeeds(functools.partial(_read, path))]


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _execute() -> None:
    try:
        os.execv("/nonexistent", ["nonexistent"])
    except FileNotFoundError:
        return  # it was looked for


def _read(path: str) -> None:
    if os.path.isdir(path):
        os.listdir(path)
    else:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def _privileges() -> list[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(ctypes.byref(header), ctypes.byref(sets))
    found = ["capabilities are left"] if any(sets) else []
    if libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        found.append("no_new_privs is off")
    if libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) != 2:
        found.append("no system-call filter is installed")
    return found


def _succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(breaches(**json.load(sys.stdin))))
