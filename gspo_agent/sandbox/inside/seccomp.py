"""The system-call filter around untrusted code, as classic BPF.

It refuses what namespaces and a dropped uid do not: new namespaces and mounts, sockets (abstract ones would join
jobs), tracing, and the parts of the kernel that programs do not need but escapes are made of. Calls newer than the list
answer ENOSYS, as on an older kernel; `clone3` too: a filter cannot read its flags, and libc falls back to `clone`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from . import linux

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_NEWEST = 456  # futex_requeue

# name: (x86-64, aarch64); -1 where the machine has no such call.
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "socket": (41, 198),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "seccomp": (317, 277),
    "vmsplice": (278, 75),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that no address-space limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # the supervisor's share of the processor
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    # the machine itself
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "personality": (135, 92),
    "modify_ldt": (154, -1),
    "iopl": (172, -1),
    "ioperm": (173, -1),
}
_MACHINES = {  # name: (audit number, column, clone, clone3, prlimit64)
    "x86_64": (0xC000003E, 0, 56, 435, 302),
    "aarch64": (0xC00000B7, 1, 220, 435, 261),
}


class Filter:
    """Built once in the fork server; `install` is two system calls in each job."""

    def __init__(self) -> None:
        program = _program(platform.machine())
        self._code = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: a length and, after padding, a pointer
        self._fprog = ctypes.create_string_buffer(
            struct.pack("@HP", len(program) // 8, ctypes.addressof(self._code)), struct.calcsize("@HP")
        )

    def install(self) -> None:
        """For this thread and all that it starts, for good."""
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.prctl(linux.PR_SET_SECCOMP, linux.SECCOMP_MODE_FILTER, ctypes.byref(self._fprog))


def _program(machine: str) -> bytes:
    try:
        audit, column, clone, clone3, prlimit = _MACHINES[machine]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine!r}; x86_64 and aarch64 are known") from None
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    absent = _step(_RETURN, _ERRNO | errno.ENOSYS)
    allow = _step(_RETURN, _ALLOW)
    steps = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NR),
        _step(_GREATER, _NEWEST, 0, 1),  # the x32 calls lie above as well
        absent,
        _step(_EQUAL, clone3, 0, 1),
        absent,
        _step(_EQUAL, clone, 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, linux.CLONE_NEWANY, 0, 1),
        refuse,
        allow,
        _step(_EQUAL, prlimit, 0, 4),  # a limit may be lowered, but only one's own
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_EQUAL, 0, 1, 0),
        refuse,
        allow,
    ]
    numbers = [calls[column] for calls in _REFUSED.values() if calls[column] >= 0]
    steps += [_step(_EQUAL, number, len(numbers) - index, 0) for index, number in enumerate(numbers)]
    return b"".join([*steps, allow, refuse])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
