"""Equations, inequalities, named values, plus-minus, and parts of the real line."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rewards.math_answer.evaluation import settled
from rewards.math_answer.nodes import Node, variables
from rewards.math_answer.outcomes import Undecided, Undefined, Unread
from rewards.math_answer.tokens import Token
from rewards.math_answer.units import REFUSED, words
from rewards.math_answer.values import (
    LINE,
    Assignment,
    Equation,
    Inequality,
    Infinity,
    Ordered,
    Piece,
    Ratio,
    RealSet,
    Scalar,
    Unordered,
    Value,
)

SIGNS = ("=", "<", ">", "<=", ">=", "!=", "in")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_ARTICLES = words("a an the this")
_NAME = re.compile(
    r"[A-Za-z](?:_\w+|_\{[\w,]+\})?'?(?:\([A-Za-z](?:,[A-Za-z])*\))?|(?:m?angle|triangle|m angle)?[A-Z]{1,4}"
    r"|[fgh]\^\{-1\}\([A-Za-z]\)|\|vec\{[A-Za-z]\}\||(?:overline|\|)?\{?[A-Z]{2}\}?\|?|\|[A-Z]\||(?:P|E|V|Var)[(\[][^()\[\]]+[)\]]|frac\{d[a-z]\}\{d[a-z]\}"
)

_POINT = re.compile(r"\([A-Za-z](?:_\w)?(?:,[A-Za-z](?:_\w)?)+\)")


def read_relation(tokens: list[Token], read: Callable[[list[Token]], Value]) -> Value | None:
    """A chain of equations, an inequality or a membership; None where the signs are inside brackets."""
    from rewards.math_answer.reading import split

    sides, signs = split(tokens, *SIGNS)
    if len(sides) == 1:
        return None
    if not all(sides):
        raise Unread
    if signs == ["in"]:
        name = name_of(sides[0])
        if name is None:
            raise Unread
        return _member(read(sides[1]))
    if set(signs) == {"="}:
        return _chain(sides, read)
    if "=" in signs or "in" in signs:
        raise Unread
    return _inequality(sides, signs)


def name_of(tokens: list[Token]) -> str | None:
    """What stands left of "=" and only names the value: x, f(x), AB, an angle, words; None for anything else."""
    if all(token.kind == "word" for token in tokens):
        said = [token.text.casefold() for token in tokens]
        return None if REFUSED.intersection(said) - _ARTICLES else " ".join(said)
    if len(tokens) == 1 and tokens[0].kind == "let" and len(tokens[0].text) > 1:
        return tokens[0].text
    text = "".join(token.text for token in tokens)
    if _POINT.fullmatch(text):
        names = text[1:-1].split(",")
        return text if names == sorted(set(names)) else None  # coordinates() takes them in this order
    if ":" in text:
        names = text.split(":")
        # Of b:a it would not be known which of them a nameless 3:2 begins with.
        return text if names == sorted(set(names)) and all(map(_NAME.fullmatch, names)) else None
    return text if _NAME.fullmatch(text) and text not in ("e", "i") else None


def _member(value: Value) -> Value:
    if isinstance(value, Ordered) and value.brackets != "<>":
        return RealSet(tuple(pieces_of(value)))
    return value


def _chain(sides: list[list[Token]], read: Callable[[list[Token]], Value]) -> Value:
    name = name_of(sides[0])
    if name is None and len(sides) == 2 and (name := name_of(sides[1])) is not None:
        sides = sides[::-1]
    if name is None:
        values = [read(side) for side in sides]
        if len(sides) == 2 and any(isinstance(value, Scalar) and variables(value.node) for value in values):
            return _equation(*values)
        if isinstance(values[0], Scalar) and is_sum_of_names(values[0].node):
            return Assignment("sum", values[-1], tuple(values[1:-1]))
        return Assignment("", values[-1], tuple(values[:-1]))
    values = [read(side) for side in sides[1:]]
    last = values[-1]
    if name.startswith("(") and not (isinstance(last, Ordered) and len(last.items) == name.count(",") + 1):
        raise Unread
    if ":" in name and not (isinstance(last, Ratio) and len(last.parts) == name.count(":") + 1):
        raise Unread
    if len(values) == 1 and isinstance(last, Scalar) and name in variables(last.node):
        return _equation(Scalar(("var", name)), last)
    return Assignment(name, last, tuple(values[:-1]))


def is_sum_of_names(node: Node) -> bool:
    """m + n or sin x, which is another name for its value."""
    if node[0] == "fn":
        return len(node[2]) == 1 and node[2][0][0] == "var" and node[1] in ("sin", "cos", "tan", "cot", "sec", "csc")
    terms = node[1] if node[0] == "+" else ()
    return len(terms) > 1 and all(term[0] == "var" for term in terms) and len(set(terms)) == len(terms)


def _equation(left: Value, right: Value) -> Equation:
    if isinstance(left, Scalar) and isinstance(right, Scalar) and not (left.unit or right.unit):
        return Equation(left.node, right.node)
    raise Unread


def _inequality(sides: list[list[Token]], signs: list[str]) -> Value:
    ends = [_end(side) for side in sides]
    middle = 0 if len(sides) == 2 and isinstance(ends[0], Scalar) and ends[0].node[0] == "var" else 1
    variable = ends[middle]
    if isinstance(variable, Scalar) and variable.node[0] == "var" and len(sides) <= 3:
        others = [end for index, end in enumerate(ends) if index != middle]
        if not any(isinstance(end, Scalar) and variables(end.node) for end in others):
            return _solved(ends, signs, middle, variable.node[1])
    if len(sides) != 2 or not all(isinstance(end, Scalar) for end in ends):
        raise Unread
    left, right = (end.node for end in ends if isinstance(end, Scalar))
    sign = signs[0]
    return Inequality(right, left, _FLIPPED[sign]) if sign in (">", ">=") else Inequality(left, right, sign)


def _end(tokens: list[Token]) -> Scalar | Infinity:
    from rewards.math_answer.reading import read_tokens

    value = read_tokens(tokens)
    if isinstance(value, Infinity) or (isinstance(value, Scalar) and not value.percent):
        return value
    raise Unread


def _solved(ends: list[Scalar | Infinity], signs: list[str], middle: int, name: str) -> RealSet:
    """x < 4, 4 > x, 2 <= x < 9: what they leave of the real line."""
    if "!=" in signs:
        point = ends[1 - middle]
        if len(ends) != 2 or not isinstance(point, Scalar):
            raise Unread
        return RealSet(LINE.pieces, (point,), name)
    low: Scalar | Infinity = Infinity(-1)
    high: Scalar | Infinity = Infinity(1)
    closed_low = closed_high = False
    for index, end in enumerate(ends):
        if index == middle:
            continue
        sign = signs[0] if index == 0 else _FLIPPED[signs[-1]]  # as "end sign variable"
        if sign in ("<", "<="):
            if low != Infinity(-1):
                raise Unread
            low, closed_low = end, sign == "<="
        else:
            if high != Infinity(1):
                raise Unread
            high, closed_high = end, sign == ">="
    return RealSet((Piece(low, closed_low, high, closed_high),), (), name)


def below(node: Node, bound: Fraction) -> bool:
    """Whether a number is that small. Raises Unread where it is none."""
    try:
        value, evaluator = settled(node, {}, Fraction(7))
    except (Undecided, Undefined):
        raise Unread from None
    return bool(value < bound) if isinstance(value, Fraction) else bool(value < evaluator.inexact(bound))


def pieces_of(value: Value) -> list[Piece]:
    """The parts of the real line that an interval, a finite set or a union stands for. Raises Unread."""
    if isinstance(value, RealSet) and not value.without:
        return list(value.pieces)
    if isinstance(value, Ordered) and len(value.items) == 2 and value.brackets != "<>":
        low, high = value.items
        if isinstance(low, Scalar | Infinity) and isinstance(high, Scalar | Infinity):
            return [Piece(low, value.brackets[0] == "[", high, value.brackets[1] == "]")]
    if isinstance(value, Unordered) and value.braced and not value.elided:
        points = [item for item in value.items if isinstance(item, Scalar)]
        if len(points) == len(value.items):
            return [Piece(point, True, point, True) for point in points]
    raise Unread


# Lists


def joined(items: list[Value], word: str) -> Value:
    """A list of values; named values of one name are a list under it, inequalities joined by "or" a set."""
    if all(isinstance(item, RealSet) and item.variable for item in items):
        return _joined_inequalities([item for item in items if isinstance(item, RealSet)], word)
    if word == "wedge":  # at once, which no two values are
        raise Unread
    first = items[0]
    names = {item.name for item in items if isinstance(item, Assignment)}
    if isinstance(first, Assignment) and names == {first.name} and first.name:
        # x = 3, x = 8, and also x = 3, 8.
        rest = [item.value if isinstance(item, Assignment) and not item.links else item for item in items]
        return Assignment(first.name, flat(rest))
    return flat(items)


def flat(items: list[Value]) -> Unordered:
    """With the two values of each plus-minus side by side with the others."""
    found: list[Value] = []
    for item in items:
        found += item.items if isinstance(item, Unordered) and not item.braced else [item]
    return Unordered(tuple(found))


def _joined_inequalities(items: list[RealSet], word: str) -> RealSet:
    if len({item.variable for item in items}) > 1 or any(item.without for item in items):
        raise Unread
    if word in ("and", "wedge"):
        return _both(items)
    if word != "or":
        raise Unread
    return RealSet(tuple(piece for item in items for piece in item.pieces), (), items[0].variable)


def _both(items: list[RealSet]) -> RealSet:
    """x > 1 and x < 2."""
    pieces = [piece for item in items for piece in item.pieces]
    lows = [piece for piece in pieces if not isinstance(piece.low, Infinity)]
    highs = [piece for piece in pieces if not isinstance(piece.high, Infinity)]
    if len(pieces) != 2 or len(lows) != 1 or len(highs) != 1:
        raise Unread
    low, high = lows[0], highs[0]
    return RealSet((Piece(low.low, low.closed_low, high.high, high.closed_high),), (), items[0].variable)


# Plus-minus


def expanded(value: Scalar) -> Value:
    """2 ± 3 as the two values that it stands for; all signs of one expression change together."""
    count = _count(value.node)
    if not count:
        return value
    if count > 1 and not (_has(value.node, "pm") and _has(value.node, "mp")):
        raise Unread
    both = (_signed(value.node, "pm"), _signed(value.node, "mp"))
    return Unordered(tuple(Scalar(node, value.unit, value.percent) for node in both))


def _count(node: Any) -> int:
    if not isinstance(node, tuple):
        return 0
    return (bool(node) and node[0] == "pm") + sum(map(_count, node))


def _has(node: Any, sign: str) -> bool:
    return isinstance(node, tuple) and (node[:2] == ("pm", sign) or any(_has(part, sign) for part in node))


def _signed(node: Any, positive: str) -> Any:
    if not isinstance(node, tuple):
        return node
    if node and node[0] == "pm":
        inner = _signed(node[2], positive)
        return inner if node[1] == positive else ("-", inner)
    return tuple(_signed(part, positive) for part in node)
