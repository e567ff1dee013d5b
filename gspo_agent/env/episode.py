"""What ToolEnv keeps beside an author's attributes, and what makes an author's `close` run once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gspo_agent.env.given import Given
from gspo_agent.env.shared import Shared
from gspo_agent.env.state import GeneratorEncoder
from gspo_agent.env.threads import run_sync
from gspo_agent.tools import Tool


@dataclass(slots=True)
class Episode:
    """What the framework keeps beside the author's attributes."""

    shared: Shared | None = None
    initial: dict[str, Any] | None = None
    """The attributes before the first setup: the same in every instance."""
    task: dict[str, Any] = field(default_factory=dict)
    task_json: Any = None
    given: Given | None = None
    """The task, where the runner keeps it."""
    generator: GeneratorEncoder = field(default_factory=GeneratorEncoder)
    turn: int = 0
    done: bool = False
    tools: dict[str, Tool] | None = None
    open: bool = False
    """`setup` began, `close` has not."""
    ready: bool = False
    """`setup` and `prompt` went well."""
    closing: bool = False
    keeping: bool = False
    """The author's own get_state or set_state is running, so that super() in it means the attributes."""
    last_good: dict[str, Any] | None = None
    """The snapshot before the call that tainted the instance."""


def once(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes an author's `close` what a caller may call at any time, from outside and as super().close()."""

    @functools.wraps(hook)
    def close(self: Any) -> Any:
        return hook(self) if self._is_closing() else run_sync(self.aclose())

    close.asynchronous = inspect.iscoroutinefunction(hook)  # type: ignore[attr-defined]
    return close


def quietly(hook: Callable[[], Any]) -> None:
    with suppress(Exception):
        hook()
