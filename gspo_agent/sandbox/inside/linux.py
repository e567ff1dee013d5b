"""The system calls that Python does not offer, by ctypes; each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_libc.capset.argtypes = _libc.capget.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
# Made once: each job would touch many pages to make the types of these arrays.
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, of this thread
Capabilities = ctypes.Array[ctypes.c_uint32]
"""The effective, permitted and inheritable set, twice 32 bits of each."""
NO_CAPABILITIES: Capabilities = (ctypes.c_uint32 * 6)()

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
CLONE_NEWANY = 0x7E020000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_READ, _WRITE, _EXECUTE = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2

# The numbers that differ between the two machines this runs on; mount_setattr has one number everywhere.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(platform.machine(), -1)
_MOUNT_SETATTR = 442
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4


class Unfit(OSError):
    """A backend cannot be had in this place, and here is what would help."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def syscall(what: str, number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        _checked(result, what)
    return result


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or 'bind'} on {target}")


def umount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_read_only(target: str, *, recursive: bool = True) -> None:
    """Read-only, nosuid, nodev for a mount (and all below it), whatever flags it had (mount_setattr, Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    call = (ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), target.encode(), flags)
    _checked(_libc.syscall(*call, ctypes.byref(attributes), ctypes.c_size_t(32)), f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.syscall(ctypes.c_long(_PIVOT_ROOT), new.encode(), old.encode()), f"pivot_root {new}")


def prctl(option: int, value: int = 0, pointer: object = None) -> None:
    if _libc.prctl(option, value, pointer, 0, 0) != 0:
        _checked(-1, f"prctl({option})")


def share_text() -> None:
    """Lets a fork have the interpreter's machine code at once, and not sixteen pages with each fault.

    A fork copies the page tables only of mappings that hold a page of the process's own, so each gets one: with the
    same bytes in it. Where that is refused, nothing is lost but time.
    """
    _join_mappings()
    with open("/proc/self/maps") as table:
        mappings = [line.split() for line in table if " r-xp " in line and "/" in line]
    for area, *_, path in mappings:
        if os.path.basename(path).startswith(("python", "libpython", "libc.")):
            start, end = (int(edge, 16) for edge in area.split("-"))
            place, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            if _libc.mprotect(place, size, _READ | _WRITE | _EXECUTE) == 0:
                ctypes.memmove(place, place, 1)
                _checked(_libc.mprotect(place, size, _READ | _EXECUTE), "mprotect")


def _join_mappings() -> None:
    """One mapping for the three of each library that are read only: the fewer there are, the less a fork copies.

    Its constants can then be executed, which no program needs help for.
    """
    with open("/proc/self/maps") as table:
        mappings = [line.split() for line in table]
    for first, code, constants in zip(mappings, mappings[1:], mappings[2:], strict=False):
        parts = (first, code, constants)
        if [part[1] for part in parts] == ["r--p", "r-xp", "r--p"] and len({part[-1] for part in parts}) == 1:
            for area, *_ in (first, constants):
                start, end = (int(edge, 16) for edge in area.split("-"))
                _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _READ | _EXECUTE)


def capabilities() -> Capabilities:
    """Those of this thread."""
    found: Capabilities = (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(_CAPABILITY_HEADER, found), "capget")
    return found


def set_capabilities(sets: Capabilities) -> None:
    _checked(_libc.capset(_CAPABILITY_HEADER, sets), "capset")
