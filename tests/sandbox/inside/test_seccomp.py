"""The numbers of the filter against the kernel's own tables, where those are installed."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from gspo_agent.sandbox.inside import seccomp

TABLES = (  # by column of the filter's lists
    ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    ("/usr/include/asm-generic/unistd.h",),  # what aarch64 uses
)
OTHERS = {
    "clone": seccomp._CLONE,
    "clone3": seccomp._CLONE3,
    "prlimit64": seccomp._PRLIMIT,
    "socketpair": seccomp._SOCKETPAIR,
    "kill": seccomp._KILL_CALL,
    "tgkill": seccomp._TGKILL,
    "fcntl": seccomp._FCNTL,
    "ioctl": seccomp._IOCTL,
    "prctl": seccomp._PRCTL,
}
ALL = {**seccomp._REFUSED, **seccomp._REFUSED_ALONE, **seccomp._REFUSED_OWNER, **OTHERS}


def table(column: int) -> dict[str, int]:
    for path in map(Path, TABLES[column]):
        if path.exists():
            found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
            return {name: int(number) for name, number in found}
    pytest.skip("the kernel's headers are not installed")


@pytest.mark.parametrize("column", [0, 1], ids=["x86-64", "aarch64"])
def test_numbers_are_those_of_the_kernels_table(column: int) -> None:
    known = table(column)
    newest = max(known.values())
    for name, numbers in ALL.items():
        ours = numbers[column]
        if ours <= newest:  # the headers may be older than the call
            assert known.get(name, -1) == ours, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("alone", [False, True])
def test_every_jump_of_the_program_stays_in_it(machine: str, alone: bool) -> None:
    rules = seccomp._Rules(machine)
    program = [
        *rules.head(),
        *(rules.alone(1) if alone else []),
        *rules.common(),
        *rules.refusals(alone, alone),
    ]
    for position, step in enumerate(program):
        code, if_true, if_false = step[0], step[2], step[3]
        if code & 7 == 5:  # a jump
            assert position + 1 + max(if_true, if_false) < len(program)
    assert program[-1] == seccomp._REFUSE
    assert len(program) < 4096  # BPF_MAXINSNS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(("alone", "owner"), [(False, False), (True, False), (True, True)])
def test_what_is_on_the_list_is_refused_and_nothing_else(machine: str, alone: bool, owner: bool) -> None:
    rules = seccomp._Rules(machine)
    program = rules.refusals(alone, owner)
    calls = {**seccomp._REFUSED, **(seccomp._REFUSED_ALONE if alone else {})}
    calls |= seccomp._REFUSED_OWNER if owner else {}
    for number in range(seccomp._NEWEST + 1):
        refused = number in {call[rules.column] for call in calls.values()}
        assert _answer(program, number) == (seccomp._REFUSE if refused else seccomp._ALLOWED), number


def _answer(program: list[bytes], number: int) -> bytes:
    """The step that the program ends at; it only asks whether the number is at least another one."""
    position = 0
    while program[position] not in (seccomp._REFUSE, seccomp._ALLOWED):
        code, if_true, if_false, least = struct.unpack("=HBBI", program[position])
        assert code == seccomp._AT_LEAST
        position += 1 + (if_true if number >= least else if_false)
    return program[position]
