"""An imitation of a container's default confinement around a command: python confinement.py KIND COMMAND...

"docker": root with Docker's 14 capabilities, and the part of its system-call profile that refuses namespaces, mounts
and clone3. "restricted": the same profile for an ordinary user without capabilities, who can gain none (Kubernetes'
`restricted`). "old": that, on a kernel without Landlock. No daemon is needed; what an image and a daemon add (AppArmor,
masked paths) is not imitated.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOBODY = 65534

_DOCKERS = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
_REFUSED_BY_DOCKER = (
    "unshare setns mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr "
    "open_by_handle_at quotactl bpf perf_event_open userfaultfd add_key request_key keyctl kcmp io_uring_setup "
    "io_uring_enter io_uring_register swapon swapoff reboot kexec_load init_module acct "
)
_LANDLOCK = 444  # landlock_create_ruleset
_PR_CAPBSET_DROP, _CAPABILITIES_V3 = 24, 0x20080522


def interpreter() -> str | None:
    """One of at least 3.11 that every user may run; an interpreter below a private home is none."""
    for path in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        check = f"import sys; sys.exit(sys.version_info < (3, 11) or not __import__('os').access({str(ROOT)!r}, 4))"
        user = {"user": NOBODY, "group": NOBODY} if os.getuid() == 0 else {}
        try:
            if subprocess.run([path, "-c", check], cwd="/", check=False, **user).returncode == 0:  # type: ignore[call-overload]
                return path
        except (PermissionError, FileNotFoundError):
            continue
    return None


def wrapped(kind: str, directory: Path) -> str | None:
    """A file to run in the place of an interpreter; it confines itself first. None where it can't be had."""
    found = interpreter()
    if found is None or (kind == "docker" and os.getuid() != 0):
        return None
    script = directory / f"python-{kind}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {found} -B {__file__} {kind} {found} "$@"\n')
    script.chmod(0o755)
    return str(script)


def confine(kind: str) -> None:
    # pytest imports this file for `wrapped` only
    from gspo_agent.sandbox.inside import linux, seccomp

    libc = ctypes.CDLL(None, use_errno=True)
    if kind != "docker":
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    rules = seccomp._Rules(os.uname().machine)
    numbers = [seccomp._REFUSED[name][rules.column] for name in _REFUSED_BY_DOCKER.split()]
    program = seccomp.Program(
        [
            *rules.head(),
            *rules.on(seccomp._CLONE3, [seccomp._ABSENT]),
            *rules.on(
                seccomp._CLONE,
                [
                    seccomp._argument(0),
                    seccomp._step(seccomp._ANY_BIT, linux.CLONE_NEWANY, 0, 1),
                    seccomp._REFUSE,
                    seccomp._ALLOWED,
                ],
            ),
            *(rules.on((_LANDLOCK, _LANDLOCK), [seccomp._ABSENT]) if kind == "old" else []),
            *[step for number in numbers for step in rules.on((number, number), [seccomp._REFUSE])],
            seccomp._ALLOWED,
        ]
    )
    program.attach()
    if os.getuid() != 0:
        return
    kept = () if kind != "docker" else _DOCKERS
    for capability in set(range(64)) - set(kept):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # those that the kernel does not have fail
    if kind != "docker":
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        return
    mask = sum(1 << capability for capability in kept)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    assert libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)(mask, mask))) == 0


if __name__ == "__main__":
    kind, *command = sys.argv[1:]
    confine(kind)
    os.environ.pop("PYTHONPATH", None)
    os.execv(command[0], command)
