"""Expressions with variables, compared by their values at fixed points."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rewards.math_answer.evaluation import difference, settled
from rewards.math_answer.nodes import Node, holds, placed, variables
from rewards.math_answer.outcomes import Rejected, Undecided, Undefined
from rewards.math_answer.units import words

_POSITIVE = 4
"""Sample points with positive coordinates only."""
_MANY = 8
"""Variables of which each is once the only negative one, and once the only positive one."""
_WHOLE = 12
_MAX_REACH_BITS = 2000
_INDICES = words("i j k l m n")


@dataclass(frozen=True, slots=True)
class _Point:
    where: dict[str, Fraction]
    kind: str
    """"near"; "signed", where a difference decides nothing; "far", where what is too large is left out."""


@lru_cache(maxsize=4096)
def _coordinate(name: str, index: int) -> Fraction:
    """Coordinates of the sample points: fixed, unlike one another, small enough for high powers."""
    draw = random.Random(f"{name}/{index}")
    denominator = draw.choice((89, 97, 101, 103))
    scale = (1, 2, 4, 3)[index % _POSITIVE]
    return Fraction(draw.randrange(1, denominator) + denominator * (scale - 1), denominator)


def _negatives(names: list[str]) -> list[frozenset[str]]:
    """Which are negative: all, each alone, all but one. For every product of some of them there is one that has its
    sign changed: sqrt(a^2 b^2) is not ab."""
    several = frozenset(names)
    alone = [frozenset((name,)) for name in names[:_MANY]]
    found = [several, *alone, *(several - one for one in alone)]
    return found if len(names) > 1 else [several] * 3


def _near(names: list[str]) -> list[_Point]:
    positive = [_Point({name: _coordinate(name, index) for name in names}, "near") for index in range(_POSITIVE)]
    signed = [
        _Point({name: _coordinate(name, index) * (-1 if name in negative else 1) for name in names}, "signed")
        for index, negative in enumerate(_negatives(names), _POSITIVE)
    ]
    return positive + signed


def _far(names: list[str], largest: int, reach: int) -> list[_Point]:
    """Beyond every number that the constants make, on both sides: |x - 10^2| is 10^2 - x up to there."""
    found = []
    for index, scale in enumerate((Fraction(3 * largest, 2), Fraction(3 * reach), Fraction(10**6 * reach))):
        # Unlike ones, so that x - y is far out as well.
        where = {name: (scale + 4 - _coordinate(name, index)) * (1 + 3 * rank) for rank, name in enumerate(names)}
        found += [_Point(where, "far"), _Point({name: -value for name, value in where.items()}, "far")]
    return found


def _whole(names: list[str], reach: int) -> list[_Point]:
    """Whole numbers; far out those that are divisible by every constant, and their neighbours."""
    drawn = {name: random.Random(name).sample(range(2, 2 + _WHOLE), _WHOLE) for name in names}
    near = [_Point({name: Fraction(drawn[name][index]) for name in names}, "near") for index in range(_WHOLE)]
    far = [
        _Point({name: Fraction(reach * (1 + rank) + beyond) for rank, name in enumerate(names)}, "far")
        for beyond in (0, 1, reach - 1)
    ]
    return near + far


def _constants(node: Node) -> list[Fraction]:
    """The sizes of the largest parts without variables, rounded up. Raises Undecided where one cannot be told."""
    if not variables(node):
        try:
            value, evaluator = settled(node, {}, Fraction(7))
        except (Undefined, Rejected):
            raise Undecided from None
        size = abs(value) if isinstance(value, Fraction) else abs(evaluator.inexact(value))
        return [Fraction(math.ceil(size) if isinstance(size, Fraction) else int(evaluator.ctx.ceil(size)))]
    found: list[Fraction] = []
    for part in node[1:]:
        if isinstance(part, tuple):
            for child in part if part and isinstance(part[0], tuple) else (part,):
                found += _constants(child)
    return found


def _reach(a: Node, b: Node) -> tuple[int, int]:
    """(the largest constant, the product of all that are not alike)."""
    sizes = set(_constants(a)) | set(_constants(b))
    product = 1
    for size in sizes:
        product *= max(1, int(size))
        if product.bit_length() > _MAX_REACH_BITS:
            raise Undecided
    return max(map(int, sizes), default=0), product


def _log_base(index: int) -> Fraction:
    """Of a log without a base, which may be any."""
    return Fraction(3 + 2 * index, 2)


def same_everywhere(a: Node, b: Node, names: frozenset[str]) -> bool:
    """By values at fixed points. Different at a positive one is different; different only elsewhere is undecided."""
    compared = {"near": 0, "signed": 0, "far": 0}
    for index, point in enumerate(points := _points(a, b, names)):
        try:
            gap = difference((a, b), point.where, _log_base(index))[2]
        except Undefined:
            continue
        except Rejected:
            if point.kind != "far":
                raise
            continue
        if gap:
            if point.kind != "near" and _unreal(a, point) and _unreal(b, point):
                continue
            if point.kind == "signed":
                raise Undecided
            return False
        compared[point.kind] += 1
    if compared["near"] + compared["signed"] < _POSITIVE:
        raise Undecided
    if not compared["far"] and any(point.kind == "far" for point in points) and (holds(a, _bends) or holds(b, _bends)):
        raise Undecided
    return True


def _unreal(node: Node, point: _Point) -> bool:
    """Whether it has no real value there: ln(x^3) is 3 ln x wherever both are real."""
    return not holds(node, lambda part: part == ("const", "i")) and settled(node, point.where, _log_base(0))[1].unreal


def _points(a: Node, b: Node, names: frozenset[str]) -> list[_Point]:
    several = sorted(names)
    bends = holds(a, _bends) or holds(b, _bends)
    counts = holds(a, _counts) or holds(b, _counts)
    if not (bends or counts):
        return _near(several)
    try:
        largest, reach = _reach(a, b)
    except Undecided:
        if bends:
            raise
        largest = reach = 1
    whole = _whole(several, reach)
    if counts:
        return whole
    near = _near(several) + _far(several, largest, reach)
    if holds(a, _steps) or holds(b, _steps):
        return whole if names <= _INDICES else whole + near
    return near


def _bends(node: Node) -> bool:
    """Whether it may follow another rule far out than near by: |x|, max(x, 5), sqrt(x^2), arctan(tan x)."""
    bent = node[0] in ("|", "binom", "mod", "root", "log") or (node[0] == "fn" and node[1] not in _SMOOTH)
    broken = node[0] == "^" and (node[2][0] == "/" or (node[2][0] == "num" and node[2][1].denominator > 1))
    return (bent or broken) and bool(variables(node))


_SMOOTH = words("sin cos tan cot sec csc sinh cosh tanh coth sech csch exp")


def _steps(node: Node) -> bool:
    """The floor of x, where the whole numbers are another case than the others."""
    return node[0] == "fn" and node[1] in ("floor", "ceil") and bool(variables(node))


def _counts(node: Node) -> bool:
    """n!, (-1)^n and gcd(n, 6): its variables can only be whole numbers."""
    if node[0] in ("!", "binom", "mod") or (node[0] == "fn" and node[1] in ("gcd", "lcm")):
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
    for point in _points(a, b, names):
        here = ("/", placed(a, point.where), placed(b, point.where))
        try:
            ratio = settled(here, {}, _log_base(0))[0]
            if not ratio or (first is not None and difference((here, first), {}, _log_base(0))[2]):
                return None
        except Undefined:
            continue
        except Rejected:
            if point.kind != "far":
                raise
            continue
        first = first or (("num", ratio) if isinstance(ratio, Fraction) else here)
        compared += 1
    if first is None or compared < _POSITIVE:
        return None
    ratio = settled(first, {}, _log_base(0))[0]
    return None if ratio.imag else ratio.real
