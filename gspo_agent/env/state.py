"""Python values as JSON and back, without loss: what `ToolEnv.get_state` writes and `set_state` reads.

Plain JSON stays as it is. Everything else is an object with one key that starts with "$": tuples, sets, bytes, numpy
arrays and scalars, floats and texts that JSON lacks, integers beyond 64 bits, dicts whose keys are no strings, and
references to a container that was met before (two attributes that hold one list still do after a restart), and
what is still as a runner's task gave it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gspo_agent.env.given import Given

_MAX_INT = 2**63 - 1
_MAX_DEPTH = 200
_CONTAINERS = frozenset({list, dict, tuple, set, frozenset, bytearray, np.ndarray})
_TEXT = frozenset({str})


class NotEncodable(Exception):
    """A value without a lossless JSON form; the message says which, and where it is."""


def encode(value: Any, name: str = "value", given: Given | None = None) -> Any:
    """`value` as JSON; of parts of `given` only the place. Raises NotEncodable, which calls the value `name`."""
    return _Encoder(given).encode(value, name)


def decode(data: Any, given: Given | None = None) -> Any:
    """Parts of what was given become those of the copy in `given`."""
    return _Decoder(given).decode(data)


class _Encoder:
    def __init__(self, given: Given | None) -> None:
        self.given = given
        self.seen: dict[int, int] = {}
        self.depth = 0
        self.alive: list[Any] = []  # an id is only unique while its object lives

    def encode(self, value: Any, place: str) -> Any:
        kind = type(value)
        if self.given is not None and (kind is str or kind in _CONTAINERS):
            keys = self.given.place(value)
            if keys is not None:
                return {"$task": keys}
        if kind is str:
            return (
                value if value.isascii() or _has_utf8(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
            )
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_MAX_INT <= value <= _MAX_INT else {"$int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind in _CONTAINERS:
            if id(value) in self.seen:
                return {"$ref": self.seen[id(value)]}
            self.seen[id(value)] = len(self.seen)
            self.alive.append(value)
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise NotEncodable(f"{place:.60}... is nested more than {_MAX_DEPTH} deep")
            made = self._container(kind, value, place)
            self.depth -= 1
            return made
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        raise NotEncodable(f"{place} is a {kind.__module__}.{kind.__qualname__}")

    def _container(self, kind: type, value: Any, place: str) -> Any:
        if kind is list:
            return [self.encode(item, f"{place}[{i}]") for i, item in enumerate(value)]
        if kind is dict:
            if set(map(type, value)) <= _TEXT and not (len(value) == 1 and next(iter(value)).startswith("$")):
                return {key: self.encode(item, f"{place}.{key}") for key, item in value.items()}
            return {
                "$dict": [[self.encode(k, f"{place} key"), self.encode(v, f"{place}[{k!r}]")] for k, v in value.items()]
            }
        if kind is np.ndarray:
            if value.dtype.kind not in "biufcSU":
                raise NotEncodable(f"{place} is a numpy array of {value.dtype}")
            data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {"$array": [value.dtype.str, list(value.shape), data]}
        if kind is bytearray:
            return {"$bytearray": base64.b64encode(value).decode()}
        items = [self.encode(item, f"{place}[{i}]") for i, item in enumerate(value)]
        return {f"${kind.__name__}": items}  # tuple, set, frozenset


class _Decoder:
    def __init__(self, given: Given | None) -> None:
        self.given = given
        self.made: list[Any] = []

    def decode(self, data: Any) -> Any:
        if type(data) is list:
            made: list[Any] = self._open([])
            made.extend(self.decode(item) for item in data)
            return made
        if type(data) is not dict:
            return data
        if len(data) == 1:
            key, body = next(iter(data.items()))
            if key.startswith("$"):
                return self._special(key, body)
        plain: dict[str, Any] = self._open({})
        for key, item in data.items():
            plain[key] = self.decode(item)
        return plain

    def _open(self, container: Any) -> Any:
        self.made.append(container)
        return container

    def _special(self, key: str, body: Any) -> Any:
        if key == "$ref":
            return self.made[body]
        if key == "$task":
            if self.given is None:
                raise ValueError("the state leaves parts of the task out, and there is no known_task")
            return self.given.at(body)
        if key in _ATOMS:
            return _ATOMS[key](body)
        if key == "$dict":
            pairs: dict[Any, Any] = self._open({})
            for k, v in body:
                name = self.decode(k)
                pairs[name] = self.decode(v)
            return pairs
        place = len(self.made)
        self.made.append(None)
        self.made[place] = self._immutable(key, body)
        return self.made[place]

    def _immutable(self, key: str, body: Any) -> Any:
        if key == "$array":
            return np.frombuffer(base64.b64decode(body[2]), dtype=body[0]).reshape(body[1]).copy()
        if key == "$bytearray":
            return bytearray(base64.b64decode(body))
        made: Callable[[Any], Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[key]
        return made([self.decode(item) for item in body])


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_ATOMS: dict[str, Callable[[Any], Any]] = {
    "$int": int,
    "$str": lambda body: bytes.fromhex(body).decode("utf-8", "surrogatepass"),
    "$float": float,
    "$bytes": base64.b64decode,
    "$scalar": lambda body: np.frombuffer(base64.b64decode(body[1]), dtype=body[0])[0],
}
