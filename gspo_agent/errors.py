"""Every exception of the framework.

GspoAgentError
├── ConfigError            stops the run before anything is loaded
│   ├── TaskError          a task file or a row of it
│   └── ChatError          a tokenizer or template that cannot be used
├── EngineError            fails the episode; its slot is filled again
├── EnvError               fails the episode; its slot is filled again
│   ├── StateLost          the handle in the journal leads nowhere
│   ├── ReplayError        a replayed environment answered differently
│   └── Unscored           no verdict could be reached: neither right nor wrong
├── SandboxError           the isolation itself failed; fails the episode
├── LearnerError           the learner's own process has gone; stops the run
├── ToolError              shown to the model as the tool's result
└── JournalError           the run directory is damaged or foreign
    ├── CheckpointLost     a checkpoint is missing or damaged
    └── RunLocked          another process owns the run directory
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 2000
"""Of the cause of a failure, as it is kept."""


class GspoAgentError(Exception):
    """The root of the tree."""


class ConfigError(GspoAgentError):
    """The configuration, or something it names, cannot be used."""


class TaskError(ConfigError):
    """A task file, or one row of it, cannot be used; the message has the line number and the field."""


class ChatError(ConfigError):
    """A tokenizer or chat template cannot be used for multi-turn episodes."""


class EngineError(GspoAgentError):
    """An engine did not answer, or answered with something that cannot be trained on."""


class EnvError(GspoAgentError):
    """An environment raised where its author did not expect it."""


class StateLost(EnvError):
    """A `handle` state leads to something that no longer exists."""


class ReplayError(EnvError):
    """A fresh environment, given the recorded actions, answered differently."""

    def __init__(self, turn: int, recorded: Any, observed: Any) -> None:
        super().__init__(f"replay differs at turn {turn}: recorded {recorded!r}, now {observed!r}")
        self.turn, self.recorded, self.observed = turn, recorded, observed


class Unscored(EnvError):
    """No verdict could be reached (an invalid gold answer, a dead judge); never to be read as reward 0."""


class SandboxError(GspoAgentError):
    """The isolation itself failed; says nothing about the code that was to run."""


class LearnerError(GspoAgentError):
    """The learner's process ended, or something in it raised what it should not."""


class ToolError(GspoAgentError):
    """Raised by a tool to tell the model that its call went wrong."""


class JournalError(GspoAgentError):
    """The run directory is damaged or belongs to something else."""


class NotBegun(JournalError):
    """A journal that nothing was written to, as a kill while it was made leaves it."""


class CheckpointLost(JournalError):
    """A checkpoint is missing, or is not what was saved; no setting and no other version could read it."""


class RunLocked(JournalError):
    """Another process owns the run directory."""


def is_fault(error: BaseException) -> bool:
    """Whether something broke; False where somebody ends this task, or the process, on purpose.

    A library whose connection closes cancels who waits for it, and sys.exit() ends a script: inside an episode both
    are faults like any other. Nobody would hear of them otherwise, since a cancelled task ends without a word.
    """
    if isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # a thread without an event loop, where nobody cancels
            task = asyncio.current_task()
            return task is None or not task.cancelling()
    return not isinstance(error, KeyboardInterrupt)


def cause_of(error: BaseException) -> str:
    """Kind and message, as they are counted, written down and shown: of a length, and in letters, that all of it can
    take."""
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


@contextmanager
def boundary(error: type[GspoAgentError], what: str) -> Iterator[None]:
    """Turns whatever an author's code raises into `error`, naming `what` broke; the framework's own errors pass."""
    try:
        yield
    except GspoAgentError:
        raise
    except BaseException as cause:
        if not is_fault(cause):
            raise
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turns what the operating system says against writing `path` into a JournalError with the remedy."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise JournalError(
            f"{place} cannot be written: {error.strerror or error}; see free space and permissions, and run the same "
            "command again"
        ) from error
