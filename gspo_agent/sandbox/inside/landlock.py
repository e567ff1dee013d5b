"""Landlock: which files, TCP ports and other processes a process may reach, without any privilege (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import struct

from . import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_VERSION, _PATH_BENEATH = 1, 1

_WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_FIFO, _MAKE_SYM, _REFER, _TRUNCATE = 1 << 10, 1 << 12, 1 << 13, 1 << 14
_ALL = (1 << 16) - 1
_KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # rights by version; then _ALL
_TCP = 3  # bind and connect, from version 4
_SCOPED = 3  # abstract sockets and signals, from version 6

READ = READ_FILE | READ_DIR
USE = READ_FILE | _WRITE_FILE
CHANGE = (
    READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG
    | _MAKE_FIFO | _MAKE_SYM | _REFER | _TRUNCATE
)  # fmt: skip


def version() -> int:
    """The kernel's version of Landlock; Unfit where there is none."""
    try:
        return linux.syscall("landlock", _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    except OSError as error:
        remedy = (
            "Landlock needs Linux 5.13 or newer, 'landlock' among the kernel's lsm=, and a container runtime that lets "
            "its system calls through"
        )
        raise linux.Unfit(str(error), remedy) from None


class Ruleset:
    """Everything that Landlock knows to refuse is refused, but for what is allowed here."""

    def __init__(self, version: int) -> None:
        self.handled = _KNOWN.get(version, _ALL)
        words = [self.handled, _TCP if version >= 4 else 0, _SCOPED if version >= 6 else 0]
        size = 8 if version < 4 else 16 if version < 6 else 24
        attributes = (ctypes.c_uint64 * 3)(*words)
        self._fd = linux.syscall(
            "landlock_create_ruleset",
            _CREATE_RULESET,
            ctypes.byref(attributes),
            ctypes.c_size_t(size),
            ctypes.c_uint(0),
        )

    def allow(self, path: int, rights: int) -> None:
        """`path`: an open descriptor (O_PATH) of a file, or of a directory and all below it."""
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & self.handled, path))
        linux.syscall(
            "landlock_add_rule",
            _ADD_RULE,
            ctypes.c_int(self._fd),
            ctypes.c_uint(_PATH_BENEATH),
            ctypes.byref(rule),
            ctypes.c_uint(0),
        )

    def restrict_self(self) -> None:
        """For this thread and all that it starts, for good."""
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.syscall("landlock_restrict_self", _RESTRICT_SELF, ctypes.c_int(self._fd), ctypes.c_uint(0))
        os.close(self._fd)
