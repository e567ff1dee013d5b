"""Values as plain data: JSON with tags for what JSON lacks, written and read without running any method of the value.

Tags: {"$float": "nan" | "inf" | "-inf"}, {"$int": "0x..."}, {"$tuple": [...]}, {"$set": [...]}, {"$bytes": hex},
{"$complex": [re, im]}, {"$dict": [[key, value], ...]}. Subclasses (Counter, namedtuple, IntEnum, bool-likes with an
`__eq__` of their own) become their base data; a generator or any other object is refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from typing import Any

MAX_DEPTH = 200
MAX_TEXT = 16 << 20
"""Characters or bytes of one string; a longer one is refused before it is copied."""
_FEW = 1000
_ALIKE = 100  # of more than a few members, those that may share a hash
_SAFE_INT = 1 << 63  # beyond it decimal digits cost quadratic time, and other readers of JSON lose them


def dumps(value: Any) -> bytes:
    """TypeError for what is not data; ValueError for what is nested deeper than MAX_DEPTH (or contains itself)."""
    return json.dumps(encode(value), allow_nan=False, separators=(",", ":")).encode()


def loads(data: bytes | str) -> Any:
    """ValueError for anything that `dumps` would not have written."""
    try:
        return decode(json.loads(data, parse_constant=_no_constant))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def encode(value: Any, depth: int = 0) -> Any:
    """What json.dumps takes."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    below = depth + 1
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__add__(value, 0)
        return number if -_SAFE_INT < number < _SAFE_INT else {"$int": hex(number)}
    if isinstance(value, float):
        plain = float.__pos__(value)
        return plain if math.isfinite(plain) else {"$float": repr(plain)}
    if isinstance(value, str | bytes | bytearray) and len(value) > MAX_TEXT:
        raise ValueError(f"a {type(value).__name__} longer than {MAX_TEXT}")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return _encode_dict(value, below)
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, below) for item in tuple.__iter__(value)]}
    kind: Any
    for kind in (list, deque, range):
        if isinstance(value, kind):
            return [encode(item, below) for item in kind.__iter__(value)]
    for kind in (set, frozenset):
        if isinstance(value, kind):
            return {"$set": [encode(item, below) for item in kind.__iter__(value)]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": bytes(memoryview(value)).hex()}
    if isinstance(value, complex):
        return {"$complex": [encode(complex.real.__get__(value)), encode(complex.imag.__get__(value))]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    pairs = [(encode(key, depth), encode(item, depth)) for key, item in dict.items(value)]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def decode(value: Any, depth: int = 0) -> Any:
    """The inverse of `encode`, for JSON that someone else wrote: nothing in it may hang or exhaust the reader."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, content, depth + 1)
    return {key: decode(item, depth + 1) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any, depth: int) -> Any:
    try:
        match tag:
            case "$float" if content in ("nan", "inf", "-inf"):
                return float(content)
            case "$int" if isinstance(content, str):
                return int(content, 16)
            case "$tuple":
                return tuple([decode(item, depth) for item in content])
            case "$set":
                return set(_spread([hashable(decode(item, depth)) for item in content]))
            case "$bytes":
                return bytes.fromhex(content)
            case "$complex":
                real, imaginary = content
                return complex(decode(real, depth), decode(imaginary, depth))
            case "$dict":
                keys = _spread([hashable(decode(key, depth)) for key, _ in content])
                return dict(zip(keys, [decode(item, depth) for _, item in content], strict=True))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{tag}: {error}") from None
    raise ValueError(f"unknown tag {tag!r}")


def _spread(members: list[Any]) -> list[Any]:
    """Refuses members chosen to share a hash (multiples of 2**61 - 1), which cost quadratic time."""
    if len(members) > _FEW and max(Counter(map(hash, members)).values()) > _ALIKE:
        raise ValueError("members collide in their hashes")
    return members


def hashable(value: Any) -> Any:
    """A key or member of a set: lists become tuples, sets become frozensets."""
    if isinstance(value, list | tuple):
        return tuple([hashable(item) for item in value])
    return frozenset(value) if isinstance(value, set) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
