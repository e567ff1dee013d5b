"""Names of an `[[env]]` section: the constructor's keyword arguments, what else takes them, and what may be named."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from gspo_agent.errors import ConfigError


def accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that `function` has a parameter for."""
    names, anything = _names(function)
    return dict(options) if anything else {name: value for name, value in options.items() if name in names}


def check_options(constructor: Callable[..., Any], options: Mapping[str, Any], place: str) -> None:
    """Raises ConfigError, with the nearest right name, for an option that `constructor` does not take or misses."""
    names, anything = _names(constructor)
    if not anything:
        check_names(options, names, f"{place}: unknown option")
    try:
        inspect.signature(constructor).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{place}: options: {error}") from None


def check_names(given: Iterable[str], known: Collection[str], problem: str) -> None:
    """Raises ConfigError, which begins with `problem`, for the first name that is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"{problem} {name!r}; {hint}")


def _names(function: Callable[..., Any]) -> tuple[set[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
