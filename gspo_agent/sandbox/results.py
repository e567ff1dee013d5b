"""What a job came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gspo_agent.sandbox.inside.tree import Changes

Status = Literal[
    "ok",
    "compile_error",  # the code is not Python; nothing ran
    "runtime_error",  # an exception, a crash, or an exit code other than 0
    "time_limit",
    "memory_limit",
    "output_limit",
    "dead",  # a session whose process ended by itself
    "infra_error",  # the job was lost twice; says nothing about the code
]


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of a program."""

    stdout: bytes
    stderr: bytes
    status: Status
    cpu_s: float
    wall_s: float
    exit_code: int | None
    """Negative: the signal that ended it. None: it was stopped at a limit or lost."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """One command in a workspace."""

    status: Status
    exit_code: int | None
    """As in RunResult."""
    output: bytes
    """Standard output and standard error, in the order of writing."""
    changes: Changes
    """Of the workspace's files."""
    left_out: list[str]
    """What is there but is kept in no workspace, one "path: reason" each."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of a function."""

    status: Status
    value: Any
    """Plain data; None unless the status is "ok"."""
    error: str
    """The traceback of the code, without frames of the harness; "" when ok."""
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell of a session."""

    output: str
    """What was printed, the last expression's value and the traceback, in order; fit to be shown to a model."""
    status: Status
    alive: bool
    """Whether the session, and with it the variables, is still there."""
    cpu_s: float
    wall_s: float
