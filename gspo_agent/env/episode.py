"""What ToolEnv keeps beside an author's attributes, what it reads from his class, and what makes `close` run once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gspo_agent.env.generator import GeneratorEncoder
from gspo_agent.env.given import Given
from gspo_agent.env.shared import Shared
from gspo_agent.env.threads import run_sync
from gspo_agent.tools import Tool

_FIXED = frozenset({str, int, float, bool, bytes, type(None)})
_EMPTY = frozenset({dict, list})


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
    last: Snapshot | None = None

    def place(self, known_turn: int | None) -> dict[str, Any]:
        """Where it stands; without the turn, where the runner knows that."""
        return {"done": self.done} if known_turn is not None else {"turn": self.turn, "done": self.done}


class Snapshot(NamedTuple):
    """A state, and what it was made from, as far as that shows by itself whether it is still the same."""

    fixed: dict[str, Any]
    generator: Any
    place: dict[str, Any]
    value: dict[str, Any]

    def holds(self, fixed: dict[str, Any] | None, generator: Any, place: dict[str, Any]) -> bool:
        return (
            fixed is not None
            and self.generator is generator
            and self.place == place
            and self.fixed.keys() == fixed.keys()
            and all([value is self.fixed[name] for name, value in fixed.items()])  # noqa: C419 (few, and often)
        )


def fixed_values(attributes: dict[str, Any]) -> dict[str, Any] | None:
    """The attributes where each is the same as long as it is the same object; None where one could change inside.

    An empty container counts: where it is empty still, or again, it is as it was.
    """
    for value in attributes.values():
        if type(value) not in _FIXED and (type(value) not in _EMPTY or value):
            return None
    return attributes


def refuse_slots(cls: type) -> None:
    """Raises TypeError where attributes would lie beside those that the state is made of."""
    for base in cls.__mro__:
        if names := vars(base).get("__slots__"):
            raise TypeError(
                f"{cls.__name__}: {base.__name__} has __slots__ {names!r}, which no state holds; leave it out"
            )


def declared_tools(cls: type, base: type) -> dict[str, Tool]:
    """Those of the class and of what it inherits from, by name. Raises TypeError where one hides a part of `base`."""
    found: dict[str, Tool] = {}
    for kind in reversed(cls.__mro__):
        for name, value in vars(kind).items():
            if isinstance(value, Tool):
                found[name] = value
            else:
                found.pop(name, None)
    for name in found:
        if hasattr(base, name):
            raise TypeError(f"{cls.__name__}.{name}: environments have a {name!r} of their own; rename the tool")
    return {tool.name: tool for tool in found.values()}


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
