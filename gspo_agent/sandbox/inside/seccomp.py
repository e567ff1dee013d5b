"""The system-call filter around untrusted code, as classic BPF.

It refuses what namespaces and a dropped uid do not: new namespaces and mounts, sockets (abstract ones would join
jobs), tracing, and the parts of the kernel that programs do not need but escapes are made of. Calls newer than the list
answer ENOSYS, as on an older kernel; `clone3` too: a filter cannot read its flags, and libc falls back to `clone`.

Where there are no namespaces it also keeps the program one process that reaches no other: no fork and no exec, signals
to itself only, no System V objects, and no change of a file's attributes where all jobs have the trainer's own id.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import struct

from . import linux

_LOAD, _AND, _EQUAL, _GREATER, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH = 0, 4
_ARGUMENTS = (16, 24)  # the lower halves of the first two
_CLONE_THREAD, _AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 0x10000, 1, 1, 0xF
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
# Refused where a program has to stay one process among others' processes and files.
_REFUSED_ALONE = {
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "process_mrelease": (448, 448),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_unlink": (241, 181),
    # Landlock has no word for watching a directory, nor, before Linux 6.2, for cutting off a file
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "truncate": (76, 45),
}
# Refused as well where the program's id owns files of the host: Landlock has no word for these either.
_REFUSED_OWNER = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "lchown": (94, -1),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
# Calls whose arguments decide.
_CLONE, _CLONE3, _PRLIMIT, _SOCKETPAIR = (56, 220), (435, 435), (302, 261), (53, 199)
_KILL_CALL, _TGKILL, _FCNTL, _IOCTL, _PRCTL = (62, 129), (234, 131), (72, 25), (16, 29), (157, 167)
_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX = 8, 10, 15  # of fcntl: whom a descriptor sends signals to
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # name: (audit number, column)


class Filter:
    """Built once in the fork server; `install` is two system calls in each job."""

    def __init__(self, *, alone: bool = False, owner: bool = False) -> None:
        """`alone`: the program stays one process. `owner`: its id owns files of the host."""
        self._alone, self._owner = alone, owner
        self._rules = _Rules(platform.machine())
        self._common = self._rules.common() + self._rules.refusals(alone, owner)
        self._program = None if alone else Program(self._rules.head() + self._common)

    def install(self) -> None:
        """For this thread and all that it starts, for good."""
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        program = self._program or Program(self._rules.head() + self._rules.alone(os.getpid()) + self._common)
        program.attach()


class Program:
    """Instructions as the kernel takes them."""

    def __init__(self, steps: list[bytes]) -> None:
        code = b"".join(steps)
        self._code = ctypes.create_string_buffer(code, len(code))
        # struct sock_fprog: a length and, after padding, a pointer
        head = struct.pack("@HP", len(steps), ctypes.addressof(self._code))
        self._head = ctypes.create_string_buffer(head, len(head))

    def attach(self) -> None:
        """Without no_new_privs that takes CAP_SYS_ADMIN."""
        linux.prctl(linux.PR_SET_SECCOMP, linux.SECCOMP_MODE_FILTER, self._head)


class _Rules:
    """Lists of instructions for one machine. Each list leaves the call's number loaded, or returns."""

    def __init__(self, machine: str) -> None:
        try:
            self.audit, self.column = _MACHINES[machine]
        except KeyError:
            known = " and ".join(_MACHINES)
            raise OSError(errno.ENOSYS, f"no system-call filter for {machine!r}; {known} are known") from None

    def head(self) -> list[bytes]:
        return [_step(_LOAD, _ARCH), _step(_EQUAL, self.audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NR)]

    def common(self) -> list[bytes]:
        return [
            _step(_GREATER, _NEWEST, 0, 1),  # the x32 calls lie above as well
            _ABSENT,
            *self.on(_CLONE3, [_ABSENT]),
            *self.on(_CLONE, [_argument(0), _step(_ANY_BIT, linux.CLONE_NEWANY, 0, 1), _REFUSE, _ALLOWED]),
            *self.on(_PRLIMIT, _only(0, 0)),  # a limit may be lowered, but only one's own
            # A pair of datagram sockets could write to, and listen at, any name.
            *self.on(_SOCKETPAIR, [*_only(0, _AF_UNIX)[:-1], *_only(1, _SOCK_STREAM, _SOCK_TYPE)]),
        ]

    def alone(self, pid: int) -> list[bytes]:
        thread = [_argument(0), _step(_ANY_BIT, _CLONE_THREAD, 1, 0), _REFUSE, _step(_LOAD, _NR)]
        return [
            *self.on(_CLONE, thread),
            *self.on(_KILL_CALL, _only(0, pid)),
            *self.on(_TGKILL, _only(0, pid)),
            *self.on(_FCNTL, _not_among(1, _SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX)),
            *self.on(_IOCTL, _not_among(1, _FIOSETOWN, _SIOCSPGRP)),
            *self.on(_PRCTL, _not_among(0, linux.PR_SET_PDEATHSIG)),
        ]

    def refusals(self, alone: bool, owner: bool) -> list[bytes]:
        """Ends the program: whatever is not refused is allowed."""
        calls = {**_REFUSED, **(_REFUSED_ALONE if alone else {}), **(_REFUSED_OWNER if owner else {})}
        numbers = {call[self.column] for call in calls.values()}
        answers = [(number, number in numbers) for number in range(_NEWEST + 1)]
        changes = [answers[0], *(new for old, new in itertools.pairwise(answers) if old[1] != new[1])]
        return [*_search(changes, 0), _ALLOWED, _REFUSE]

    def on(self, call: tuple[int, int], then: list[bytes]) -> list[bytes]:
        return [_step(_EQUAL, call[self.column], 0, len(then)), *then]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _search(changes: list[tuple[int, bool]], behind: int) -> list[bytes]:
    """By halves: whoever installs a filter waits until the kernel has tried every call on it.

    Args:
        changes: calls, ascending, from each of which on all are refused, or allowed.
        behind: steps between these and the last two, which allow and refuse.
    """
    if len(changes) == 1:
        return []
    middle = len(changes) // 2
    above = _search(changes[middle:], behind)
    below = _search(changes[:middle], behind + len(above))
    end = len(below) + len(above) + behind
    if_above = len(below) if above else end + changes[-1][1]
    return [_step(_AT_LEAST, changes[middle][0], if_above, 0 if below else end + changes[0][1]), *below, *above]


def _argument(index: int) -> bytes:
    return _step(_LOAD, _ARGUMENTS[index])


def _only(argument: int, value: int, mask: int = 0xFFFFFFFF) -> list[bytes]:
    return [_argument(argument), _step(_AND, mask), _step(_EQUAL, value, 1, 0), _REFUSE, _ALLOWED]


def _not_among(argument: int, *values: int) -> list[bytes]:
    tests = [_step(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [_argument(argument), *tests, _ALLOWED, _REFUSE]


_REFUSE = _step(_RETURN, _ERRNO | errno.EPERM)
_ABSENT = _step(_RETURN, _ERRNO | errno.ENOSYS)
_ALLOWED = _step(_RETURN, _ALLOW)
