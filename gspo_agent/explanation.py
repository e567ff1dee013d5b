"""Explanation: what pydantic says against a configuration, as one line with the place and the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Tags = Mapping[str, type[BaseModel]]


def explain(model: type[BaseModel], problem: Any, source: str, tags: Tags) -> str:
    """
    Args:
        problem: One of `ValidationError.errors()` of `model`.
        source: Where the data came from, to begin the line with.
        tags: Tag -> section, of the tagged unions.
    """
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _fields(model, problem["loc"][:-1], tags)
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{source}: unknown key {place}; {hint}"
    if problem["type"] == "missing":
        return f"{source}: {place} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    # A whole section says less than the message, which names the key.
    given = "" if isinstance(problem["input"], dict) else f" (given {problem['input']!r})"
    return f"{source}: {place}: {message}{given}" if place else f"{source}: {message}"


def _fields(model: type[BaseModel], loc: tuple[Any, ...], tags: Tags) -> list[str]:
    """The names allowed at `loc`, walking through nested sections, lists and tagged unions."""
    kind: Any = model
    for part in loc:
        if isinstance(part, int):
            continue
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = _section(kind.model_fields[part].annotation)
        else:  # the tag of a union
            kind = tags.get(part, kind)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _section(annotation: Any) -> Any:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return annotation
