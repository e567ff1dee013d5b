"""Expressions with variables, compared by their values at fixed points."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rewards.math_answer.evaluation import difference, settled
from rewards.math_answer.nodes import Node, holds, placed, variables
from rewards.math_answer.outcomes import Rejected, Undecided, Undefined

_POSITIVE, _POINTS = 4, 8
"""Sample points with positive coordinates only, and in all; two more lie far out."""
_MOST_FAR = 10**6


@lru_cache(maxsize=4096)
def _coordinate(name: str, index: int) -> Fraction:
    """Coordinates of the sample points: fixed, unlike one another, small enough for high powers."""
    draw = random.Random(f"{name}/{index}")
    denominator = draw.choice((89, 97, 101, 103))
    scale = (1, 2, 4, 3)[index % _POSITIVE]
    return Fraction(draw.randrange(1, denominator) + denominator * (scale - 1), denominator)


def _near(names: list[str], index: int) -> dict[str, Fraction]:
    """All positive, all negative, and then neighbours of unlike sign: sqrt(a^2 b^2) is not ab."""
    negative = (lambda _: True, lambda rank: rank % 2 == 0, lambda rank: rank % 2 == 1, lambda rank: rank // 2 % 2 == 0)
    signed = negative[index - _POSITIVE] if index >= _POSITIVE else lambda _: False
    return {name: _coordinate(name, index) * (-1 if signed(rank) else 1) for rank, name in enumerate(names)}


def _far(name: str, index: int, constant: int) -> Fraction:
    """A coordinate beyond every number that is written: |x - 10| is 10 - x up to there."""
    value = Fraction(3 * constant + 7 + random.Random(f"{name}/{index}").randrange(9), 2)
    return value if index == _POINTS else -value


def _largest(node: Any) -> int:
    if isinstance(node, Fraction):
        return min(-(-abs(node.numerator) // node.denominator), _MOST_FAR)
    return max(map(_largest, node), default=0) if isinstance(node, tuple) else 0


def _log_base(index: int) -> Fraction:
    """Of a log without a base, which may be any."""
    return Fraction(3 + 2 * index, 2)


def same_everywhere(a: Node, b: Node, names: frozenset[str]) -> bool:
    """By values at fixed points. Different at a positive one is different; different only elsewhere is undecided."""
    compared = 0
    for index, point in _points(a, b, names):
        try:
            gap = difference((a, b), point, _log_base(index))[2]
        except Undefined:
            continue
        except Rejected:
            if index < _POINTS:
                raise
            continue
        if gap:
            if _POSITIVE <= index < _POINTS:
                raise Undecided
            return False
        compared += 1
    if compared < _POSITIVE:
        raise Undecided
    return True


def _points(a: Node, b: Node, names: frozenset[str]) -> list[tuple[int, dict[str, Fraction]]]:
    if holds(a, _counts) or holds(b, _counts):
        return [(index, {name: _whole(name, index) for name in names}) for index in range(_POINTS)]
    near = [(index, _near(sorted(names), index)) for index in range(_POINTS)]
    constant = max(_largest(a), _largest(b))
    far = [(index, {name: _far(name, index, constant) for name in names}) for index in (_POINTS, _POINTS + 1)]
    return near + far


def _whole(name: str, index: int) -> Fraction:
    return Fraction(2 + index + random.Random(name).randrange(3))


def _counts(node: Node) -> bool:
    """n!, and (-1)^n: its variables can only be whole numbers."""
    if node[0] in ("!", "binom"):
        return bool(variables(node))
    return node[0] == "^" and node[1][0] == "-" and not variables(node[1]) and bool(variables(node[2]))


def cancelling(a: Node, b: Node) -> bool:
    """Whether a variable of one side only might fall out: x - x + 1, but not x."""
    return not (a[0] == "var" or b[0] == "var")


def has_free_base(*nodes: Node) -> bool:
    return any(holds(node, lambda part: part[:2] == ("fn", "log")) for node in nodes)


def constant_ratio(a: Node, b: Node) -> Any | None:
    """The constant that `a` is times `b`, wherever their variables are; None if there is none."""
    names = variables(a)
    if names != variables(b) or not names:
        return None
    first: Node | None = None
    compared = 0
    for _, point in _points(a, b, names)[:_POINTS]:
        here = ("/", placed(a, point), placed(b, point))
        try:
            ratio = settled(here, {}, _log_base(0))[0]
            if not ratio or (first is not None and difference((here, first), {}, _log_base(0))[2]):
                return None
        except Undefined:
            continue
        first = first or (("num", ratio) if isinstance(ratio, Fraction) else here)
        compared += 1
    if first is None or compared < _POSITIVE:
        return None
    ratio = settled(first, {}, _log_base(0))[0]
    return None if ratio.imag else ratio.real
