"""When an answer is the expected one: tokens of an output, and plain data.

Both sides are plain data by the time they come here, so that no method of the judged code can run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import Any

TOLERANCE = 1e-6
_INTEGER = re.compile(rb"[+-]?(?:0|[1-9][0-9]*)")
_DECIMAL = re.compile(rb"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]{1,9})?")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_MAX_DIGITS = 1000
_WIDE = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_GREEDY = 500  # members of an unordered collection that are matched one by one, with tolerance


def differing_token(output: bytes, expected: bytes, *, tolerant: bool = True) -> int | None:
    """The first token, counted from 1, in which an output differs; None when all agree.

    Tokens are separated by any white space. With `tolerant`, an expected token that is a decimal number allows
    |a - b| <= 1e-6 * max(1, |b|); integers of any size must be equal.
    """
    wanted = expected.split()
    given = output.split(None, len(wanted))  # what comes after as many tokens is one too many, however long it is
    for position, (token, right) in enumerate(zip(given, wanted, strict=False), 1):
        if token != right and not (tolerant and _same_number(token, right)):
            return position
    return None if len(given) == len(wanted) else min(len(given), len(wanted)) + 1


def same_lines(output: bytes, expected: bytes, *, tolerant: bool = True) -> bool:
    """Like tokens, with line breaks in the same places; blank lines and blanks at line ends do not count."""
    given, wanted = ([line for line in text.splitlines() if line.strip()] for text in (output, expected))
    return len(given) == len(wanted) and all(
        differing_token(line, right, tolerant=tolerant) is None for line, right in zip(given, wanted, strict=True)
    )


def _same_number(token: bytes, right: bytes) -> bool:
    if max(len(token), len(right)) > _MAX_DIGITS:
        return False
    if _INTEGER.fullmatch(right):
        return bool(_INTEGER.fullmatch(token)) and Decimal(token.decode()) == Decimal(right.decode())
    if not (_DECIMAL.fullmatch(right) and _NUMBER.fullmatch(token)):
        return False
    with localcontext(_WIDE):
        a, b = Decimal(token.decode()), Decimal(right.decode())
        return abs(a - b) <= Decimal("1e-6") * max(Decimal(1), abs(b))


def same_value(value: Any, expected: Any, *, unordered: bool = False) -> bool:
    """Whether plain data agree: a list is a tuple at every depth, an int is a float only when exactly equal, floats
    agree within 1e-6 (absolute below 1, else relative), NaN is NaN, a bool is no number, keys keep their type.

    With `unordered`, the outermost lists, tuples or sets agree in any order, with the same multiplicities.
    """
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_real(value, expected)
    if isinstance(expected, complex) and isinstance(value, int | float | complex):
        return _same_complex(value, expected)
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        if unordered:
            return _same_members(list(value), list(expected))
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return _same_dict(value, expected)
    sets = isinstance(value, set | frozenset), isinstance(expected, set | frozenset)
    if all(sets) or (unordered and any(sets) and isinstance(expected, list | tuple | set | frozenset)):
        return isinstance(value, list | tuple | set | frozenset) and _same_members(list(value), list(expected))
    return type(value) is type(expected) and bool(value == expected)


def _same_real(value: int | float, expected: int | float) -> bool:
    if isinstance(value, int) or isinstance(expected, int):
        return value == expected
    if math.isnan(value) or math.isnan(expected):
        return math.isnan(value) and math.isnan(expected)
    if math.isinf(value) or math.isinf(expected):
        return value == expected
    return abs(value - expected) <= TOLERANCE * max(1.0, abs(expected))


def _same_complex(value: int | float | complex, expected: complex) -> bool:
    try:
        value = complex(value)
    except OverflowError:
        return False
    return _same_real(value.real, expected.real) and _same_real(value.imag, expected.imag)


def _same_dict(value: dict[Any, Any], expected: dict[Any, Any]) -> bool:
    found = {_typed(key): item for key, item in value.items()}
    if len(value) != len(expected) or len(found) != len(value):
        return False
    return all(_typed(key) in found and same_value(found[_typed(key)], item) for key, item in expected.items())


def _same_members(value: list[Any], expected: list[Any]) -> bool:
    if len(value) != len(expected):
        return False
    if _counted(map(_typed, value), Counter(map(_typed, expected))):
        return True
    if len(value) > _GREEDY:
        return False
    left = list(expected)
    for item in value:
        match = next((index for index, other in enumerate(left) if same_value(item, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _counted(keys: Iterable[Any], counts: Counter[Any]) -> bool:
    """Whether as many `keys` are exactly what was counted. They are only looked up: a table of keys that someone chose
    to share a hash takes quadratic time to make."""
    for key in keys:
        if counts.get(key, 0) < 1:
            return False
        counts[key] -= 1
    return True


def _typed(value: Any) -> Any:
    """A hashable form that is equal for equal data only: 1 is 1.0 but neither True nor "1"."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, list | tuple):
        return "list", tuple(map(_typed, value))
    if isinstance(value, set | frozenset):
        return "set", frozenset(map(_typed, value))
    if isinstance(value, dict):
        return "dict", frozenset((_typed(key), _typed(item)) for key, item in value.items())
    if isinstance(value, float) and math.isnan(value):
        return "nan", None
    return ("number" if isinstance(value, int | float | complex) else type(value).__name__), value
