"""Values between two programs: data by value, mutable containers with their identity within one request and its reply.

JSON in which every object is a tag, those of `inside.data` for scalars, and: {"$box": [number, kind, content]}, a
mutable container; {"$same": number}, one of the same message; {"$old": number}, one of the request that is answered;
{"$tuple": [...]}, {"$frozen": [...]}; {"$made": [kind, arguments]}; {"$constant": name}. Exact types only: what
has a class of its own is none of ours, and is left to `other`.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import data

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MUTABLE: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
}
_BOXED = {kind: name for name, kind in _MUTABLE.items()}
_CONSTANTS = {"NotImplemented": NotImplemented, "Ellipsis": ...}
# name: (type, its arguments, what makes it of them)
_MADE: dict[str, tuple[type[Any], Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], slice),
    "Decimal": (decimal.Decimal, lambda v: [str(v)], decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], fractions.Fraction),
    "date": (datetime.date, lambda v: [v.isoformat()], datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: [v.isoformat()], datetime.time.fromisoformat),
    "datetime": (datetime.datetime, lambda v: [v.isoformat()], datetime.datetime.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    "UUID": (uuid.UUID, lambda v: [str(v)], uuid.UUID),
    "PosixPath": (pathlib.PosixPath, lambda v: [str(v)], pathlib.PosixPath),
    "PurePosixPath": (pathlib.PurePosixPath, lambda v: [str(v)], pathlib.PurePosixPath),
}
_MADE_OF = {kind: (name, arguments) for name, (kind, arguments, _) in _MADE.items()}


class Packer:
    """Encodes the values of one message.

    Args:
        other: encodes what is not data.
        received: containers of the request that this message answers, by their number there.
    """

    def __init__(self, other: Callable[[Any], Any], received: Mapping[int, Any] | None = None) -> None:
        self.boxes: dict[int, Any] = {}
        self._other = other
        self._numbers: dict[int, int] = {}
        self._old = {id(box): number for number, box in (received or {}).items()}

    def pack(self, value: Any, depth: int = 0) -> Any:
        """ValueError for what is nested too deeply."""
        if depth > data.MAX_DEPTH:
            raise ValueError(f"nested deeper than {data.MAX_DEPTH}")
        kind = type(value)
        if kind in _SCALARS:
            return data.encode(value)
        if kind in _BOXED:
            return self._box(value, _BOXED[kind], depth)
        if kind is tuple or kind is frozenset:
            return {"$tuple" if kind is tuple else "$frozen": [self.pack(item, depth + 1) for item in value]}
        if kind in _MADE_OF:
            name, arguments = _MADE_OF[kind]
            return {"$made": [name, [self.pack(item, depth + 1) for item in arguments(value)]]}
        for name, constant in _CONSTANTS.items():
            if value is constant:
                return {"$constant": name}
        return self._other(value)

    def content(self, box: Any, depth: int = 0) -> Any:
        """What is in a container."""
        if type(box) is bytearray:
            return box.hex()
        items = [part for pair in dict.items(box) for part in pair] if isinstance(box, dict) else list(box)
        return [self.pack(item, depth + 1) for item in items]

    def _box(self, box: Any, kind: str, depth: int) -> Any:
        if id(box) in self._old:
            return {"$old": self._old[id(box)]}
        if id(box) in self._numbers:
            return {"$same": self._numbers[id(box)]}
        number = len(self.boxes)
        self._numbers[id(box)], self.boxes[number] = number, box
        return {"$box": [number, kind, self.content(box, depth)]}


class Unpacker:
    """Decodes the values of one message; ValueError, TypeError, KeyError for what no Packer would have written.

    Args:
        other: decodes a tag that is not data.
        sent: containers of the request that this message answers, by their number there.
    """

    def __init__(self, other: Callable[[str, Any], Any], sent: Mapping[int, Any] | None = None) -> None:
        self.boxes: dict[int, Any] = {}
        self._other, self._sent = other, sent or {}

    def unpack(self, value: Any, depth: int = 0) -> Any:
        if depth > data.MAX_DEPTH:
            raise ValueError(f"nested deeper than {data.MAX_DEPTH}")
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise ValueError("a bare list is no value")
            return value
        ((tag, content),) = value.items()
        match tag:
            case "$box":
                number, kind, items = content
                box = self.boxes[number] = _MUTABLE[kind]()
                self.fill(box, items, depth)
                return box
            case "$same":
                return self.boxes[content]
            case "$old":
                return self._sent[content]
            case "$tuple":
                return tuple([self.unpack(item, depth + 1) for item in content])
            case "$frozen":
                return frozenset([self.unpack(item, depth + 1) for item in content])
            case "$made":
                name, arguments = content
                return _MADE[name][2](*[self.unpack(item, depth + 1) for item in arguments])
            case "$constant":
                return _CONSTANTS[content]
            case "$float" | "$int" | "$bytes" | "$complex":
                return data.decode(value)
        return self._other(tag, content)

    def fill(self, box: Any, content: Any, depth: int = 0) -> None:
        """Replaces what is in a container."""
        if type(box) is bytearray:
            box[:] = bytes.fromhex(content)
            return
        items = [self.unpack(item, depth + 1) for item in content]
        box.clear()
        if isinstance(box, dict):
            for key, item in zip(items[::2], items[1::2], strict=True):
                type(box).__setitem__(box, key, item)
        elif isinstance(box, set):
            box.update(items)
        else:
            box.extend(items)


def snapshot(box: Any) -> Sequence[Any] | bytes:
    """What is in a container now, to be compared with what will be."""
    if type(box) is bytearray:
        return bytes(box)
    return [part for pair in dict.items(box) for part in pair] if isinstance(box, dict) else list(box)


def unchanged(box: Any, before: Sequence[Any] | bytes) -> bool:
    """Whether a container still holds the same objects; runs no method of theirs."""
    now = snapshot(box)
    if isinstance(now, bytes):
        return now == before
    return len(now) == len(before) and all(map(_is, now, before))


def _is(one: Any, other: Any) -> bool:
    return one is other
