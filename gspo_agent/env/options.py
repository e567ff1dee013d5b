"""`[env.options]`: the keyword arguments of an environment's constructor, and what else takes them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gspo_agent.errors import ConfigError


def accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that `function` has a parameter for."""
    names, anything = _names(function)
    return dict(options) if anything else {name: value for name, value in options.items() if name in names}


def check_options(constructor: Callable[..., Any], options: Mapping[str, Any], place: str) -> None:
    """Raises ConfigError, with the nearest right name, for an option that `constructor` does not take or misses."""
    names, anything = _names(constructor)
    for name in options:
        if name not in names and not anything:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(names)) or 'none'}"
            raise ConfigError(f"{place}: unknown option {name!r}; {hint}")
    try:
        inspect.signature(constructor).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{place}: options: {error}") from None


def _names(function: Callable[..., Any]) -> tuple[set[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
