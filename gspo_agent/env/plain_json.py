"""Plain JSON: what comes back from the journal equal to what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

Dumps = Callable[[Any], str | bytes]


def no_json(value: Any, name: str, dumps: Dumps = orjson.dumps) -> str:
    """Where and why `value`, called `name`, would not come back equal; "" where it would.

    >>> no_json({"scores": [1.0, math.nan]}, "state")
    "state['scores'][1] is nan, which comes back as None"
    """
    return next((line for _, line in changes(value, name, dumps)), "")


def changes(value: Any, place: str, dumps: Dumps = orjson.dumps) -> Iterator[tuple[Any, str]]:
    """The parts of `value` that JSON gives back otherwise, or not at all, each with a line that says so."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                yield key, f"{place} has the key {key!r:.60}, a {type(key).__name__} and no text"
            yield from changes(item, f"{place}[{key!r:.60}]", dumps)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from changes(item, f"{place}[{position}]", dumps)
    else:
        try:
            back = orjson.loads(dumps(value))
        except (TypeError, ValueError) as error:
            yield value, f"{place} is {value!r:.60}, a {type(value).__name__}: {error}"
        else:
            if back != value:
                yield value, f"{place} is {value!r:.60}, which comes back as {back!r:.60}"
