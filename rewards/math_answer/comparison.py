"""Whether two values are the same: by type, and closed to everything that is not named here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rewards.math_answer.evaluation import difference, settled
from rewards.math_answer.nodes import BIG_OPERATORS, Node, variables
from rewards.math_answer.outcomes import Rejected, Undecided, Unread
from rewards.math_answer.relations import is_sum_of_names, pieces_of
from rewards.math_answer.sampling import cancelling, constant_ratio, has_free_base, same_everywhere
from rewards.math_answer.values import (
    Assignment,
    Based,
    Equation,
    Inequality,
    Infinity,
    Matrix,
    Ordered,
    Piece,
    Ratio,
    RealSet,
    Scalar,
    Symbol,
    Text,
    Unordered,
    Value,
)

MAX_COMPARISONS = 200


class Comparison:
    """One comparison of an answer with a gold answer.

    Args:
        rel_tol: What two numbers may differ by, as a share of the gold one; 0 is exact.
        decimals: Whether a number is right that is the gold one when rounded to as many decimals as that has.
    """

    def __init__(self, rel_tol: Fraction = Fraction(0), decimals: bool = False) -> None:
        self.rel_tol, self.decimals = rel_tol, decimals
        self._half_a_unit = Fraction(0)
        self.exact = True
        """Whether only rational numbers were compared."""
        self._left = MAX_COMPARISONS

    @property
    def path(self) -> str:
        """How it was decided, as a verdict says it."""
        return "fraction" if self.exact else "parser"

    def same(self, answer: Value, gold: Value) -> tuple[bool, str]:
        """(whether they are, the kind of what was compared). Raises Undecided, Undefined or Rejected."""
        if isinstance(answer, Assignment) or isinstance(gold, Assignment):
            return self.named(answer, gold)
        if isinstance(answer, Inequality) or isinstance(gold, Inequality):
            return self.inequalities(answer, gold), "inequality"
        if isinstance(answer, RealSet) or isinstance(gold, RealSet):
            return self.real_sets(answer, gold), "set"
        if isinstance(answer, Equation) and isinstance(gold, Scalar):
            return self.sum_named(answer, gold), "num"
        if isinstance(answer, Scalar) and isinstance(gold, Based):
            # The question named the base; without digits that fit, it is another number.
            return bool(answer.bare) and answer.bare.lstrip("0") == gold.digits, "base"
        if isinstance(answer, Unordered) and isinstance(gold, Ordered):
            return self.coordinates(answer, gold), "tuple"
        if isinstance(answer, Ordered) and isinstance(gold, Unordered):
            return self.coordinates(gold, answer), "tuple"
        if isinstance(answer, Matrix) or isinstance(gold, Matrix):
            return self.matrices(answer, gold), "matrix"
        if type(answer) is not type(gold):
            return False, "type"
        return self.of_one_type(answer, gold)

    def of_one_type(self, a: Any, b: Any) -> tuple[bool, str]:
        match a:
            case Scalar():
                return self.scalars(a, b), "num"
            case Ordered():
                return a.brackets == b.brackets and self.in_order(a.items, b.items), "tuple"
            case Unordered():
                return self.unordered(a, b), "set"
            case Ratio():
                return self.in_order(a.parts, b.parts), "ratio"
            case Equation():
                return self.factor((a.left, a.right), (b.left, b.right)) is not None, "equation"
            case Infinity() | Text() | Symbol() | Based():
                return a == b, type(a).__name__.lower()
        raise Undecided

    # Scalars

    def scalars(self, a: Scalar, b: Scalar) -> bool:
        if a.unit and b.unit and a.unit != b.unit:
            return False
        self._half_a_unit = Fraction(1, 2 * 10**b.decimals) if self.decimals and b.decimals else Fraction(0)
        if b.percent and not a.percent:
            self._half_a_unit /= 100
        if a.percent == b.percent:
            return self.nodes(a.node, b.node)
        if a.unit or b.unit:
            return False
        percent, plain = (a.node, b.node) if a.percent else (b.node, a.node)
        share = ("/", percent, ("num", Fraction(100)))
        if self.nodes(share, plain) if a.percent else self.nodes(plain, share):
            return True
        # "35" for 35 %: where the number can't be a share of 1.
        return self.nodes(percent, plain) and self.above_one(percent)

    def above_one(self, node: Node) -> bool:
        value, evaluator = settled(node, {}, Fraction(7))
        return bool(abs(evaluator.inexact(value)) > 1)

    def nodes(self, a: Node, b: Node) -> bool:
        """Whether two expressions have the same value wherever their variables are."""
        self._left -= 1
        if self._left < 0:
            raise Rejected("too_many_comparisons")
        if a == b and a[0] == "var":
            return True
        a = _with_constant(a, b)
        names = variables(a)
        if names != variables(b) and not cancelling(a, b):
            return False
        names |= variables(b)
        if not names and not has_free_base(a, b):
            return self.constants(a, b)
        self.exact = False
        return same_everywhere(a, b, names)

    def constants(self, a: Node, b: Node) -> bool:
        x, y, gap = difference((a, b), {}, Fraction(7))
        if not (isinstance(x, Fraction) and isinstance(y, Fraction)):
            self.exact = False
        if not gap:
            return True
        return _at_most(gap, abs(y), self.rel_tol) or _at_most(gap, 1, self._half_a_unit)

    # Collections

    def in_order(self, a: Sequence[Value], b: Sequence[Value]) -> bool:
        return len(a) == len(b) and all(self.same(x, y)[0] for x, y in zip(a, b, strict=True))

    def unordered(self, a: Unordered, b: Unordered) -> bool:
        if a.elided or b.elided:
            return self.in_order(a.items, b.items)
        if len({isinstance(item, Assignment) for item in (*a.items, *b.items)}) > 1:
            if not (_numbered(a) or _numbered(b)):
                return False  # 3, 5 does not say which is a of a = 5, b = 3
            a, b = Unordered(tuple(map(_unnamed, a.items))), Unordered(tuple(map(_unnamed, b.items)))
        mine = self.distinct(a.items) if a.braced else list(a.items)
        theirs = self.distinct(b.items) if b.braced else list(b.items)
        return len(mine) == len(theirs) and self.matched(mine, theirs)

    def matched(self, a: list[Value], b: list[Value]) -> bool:
        left = list(b)
        for item in a:
            found = next((index for index, other in enumerate(left) if self.same(item, other)[0]), None)
            if found is None:
                return False
            del left[found]
        return not left

    def distinct(self, items: Sequence[Value]) -> list[Value]:
        found: list[Value] = []
        for item in items:
            if not any(self.same(item, other)[0] for other in found):
                found.append(item)
        return found

    def coordinates(self, named: Unordered, point: Ordered) -> bool:
        """x = 4, y = -7 beside (4, -7)."""
        items = [item for item in named.items if isinstance(item, Assignment) and not item.links]
        names = [item.name for item in items]
        if point.brackets != "()" or len(items) != len(named.items) or names != sorted(set(names)):
            return False
        return self.in_order([item.value for item in items], point.items)

    def matrices(self, a: Value, b: Value) -> bool:
        rows, others = _rows(a), _rows(b)
        if rows is None or others is None or [len(row) for row in rows] != [len(row) for row in others]:
            return False
        return all(self.in_order(row, other) for row, other in zip(rows, others, strict=True))

    # Named values, equations, inequalities

    def named(self, answer: Value, gold: Value) -> tuple[bool, str]:
        for side in (answer, gold):
            if isinstance(side, Assignment) and not all(self.same(link, side.value)[0] for link in side.links):
                return False, "chain"
        if isinstance(answer, Assignment) and isinstance(gold, Assignment) and answer.name and gold.name:
            if answer.name == gold.name:
                return self.same(answer.value, gold.value)
            return self.equations(answer, gold), "name"
        if isinstance(answer, Equation) or isinstance(gold, Equation):
            # 3x + 7 = 22 is the question, not x = 5.
            return not _solves(gold) and self.equations(answer, gold), "equation"
        return self.same(_unnamed(answer), _unnamed(gold))

    def sum_named(self, answer: Equation, gold: Scalar) -> bool:
        """m + n = 14 says what m + n is."""
        if answer.left[0] in BIG_OPERATORS:
            return self.nodes(answer.right, gold.node) and self.nodes(answer.left, answer.right)
        named = is_sum_of_names(answer.left) and not variables(answer.right) and not variables(gold.node)
        return named and not gold.percent and self.nodes(answer.right, gold.node)

    def equations(self, a: Value, b: Value) -> bool:
        left, right = _as_equation(a), _as_equation(b)
        return left is not None and right is not None and self.factor(left, right) is not None

    def factor(self, a: tuple[Node, Node], b: tuple[Node, Node]) -> Any | None:
        """The constant that one equation is the other times; None if there is none."""
        self.exact = False
        first, second = (("+", (left, ("-", right))) for left, right in (a, b))
        return constant_ratio(first, second)

    def inequalities(self, answer: Value, gold: Value) -> bool:
        a, b = _as_inequality(answer), _as_inequality(gold)
        if a is None or b is None or a.sign != b.sign or (isinstance(gold, RealSet) and not _isolated(a)):
            return False
        factor = self.factor((a.left, a.right), (b.left, b.right))
        return factor is not None and (a.sign == "!=" or bool(factor > 0))

    # Parts of the real line

    def real_sets(self, answer: Value, gold: Value) -> bool:
        a, b = _as_real_set(answer), _as_real_set(gold)
        if a is None or b is None or (a.variable and b.variable and a.variable != b.variable):
            return False
        mine, theirs = self.pieces(a), self.pieces(b)
        return len(mine) == len(theirs) and all(
            x.closed_low == y.closed_low
            and x.closed_high == y.closed_high
            and self.same(x.low, y.low)[0]
            and self.same(x.high, y.high)[0]
            for x, y in zip(mine, theirs, strict=True)
        )

    def pieces(self, whole: RealSet) -> list[Piece]:
        """Sorted, and joined where they touch. Raises Unread for an empty piece."""
        keyed = sorted(whole.pieces, key=lambda piece: (_position(piece.low), not piece.closed_low))
        if any(not _in_order(piece) for piece in keyed):
            raise Unread
        found: list[Piece] = []
        for piece in keyed:
            if found and self.touch(found[-1], piece):
                last = found[-1]
                later = _position(piece.high) > _position(last.high)
                both = self.same(piece.high, last.high)[0]
                high, closed = (piece.high, piece.closed_high) if later else (last.high, last.closed_high)
                found[-1] = Piece(
                    last.low, last.closed_low, high, closed or (both and (piece.closed_high or last.closed_high))
                )
            else:
                found.append(piece)
        for point in whole.without:
            found = self.cut(found, point)
        return found

    def touch(self, left: Piece, right: Piece) -> bool:
        if self.same(left.high, right.low)[0]:
            return left.closed_high or right.closed_low
        return bool(_position(left.high) > _position(right.low))

    def cut(self, pieces: list[Piece], point: Scalar) -> list[Piece]:
        at = _position(point)
        around = [piece for piece in pieces if _position(piece.low) < at < _position(piece.high)]
        if len(around) != 1:
            raise Unread
        index, piece = pieces.index(around[0]), around[0]
        left = Piece(piece.low, piece.closed_low, point, False)
        right = Piece(point, False, piece.high, piece.closed_high)
        return [*pieces[:index], left, right, *pieces[index + 1 :]]


def _at_most(gap: Any, size: Any, share: Fraction) -> bool:
    return bool(share and abs(gap) * share.denominator <= size * share.numerator)


# Forms of one another


def _with_constant(a: Node, b: Node) -> Node:
    """x^2 + c beside x^2 + C: the constant of an integral has any name."""
    lost, found = variables(a) - variables(b), variables(b) - variables(a)
    if len(lost) != 1 or found != {"C"} or not lost <= {"c", "K", "k"} or not (variables(a) & variables(b)):
        return a
    old, new = ("var", *lost), ("var", "C")
    if a[0] != "+" or b[0] != "+" or old not in a[1] or new not in b[1]:
        return a
    rest = tuple(term for term in a[1] if term != old)
    return ("+", (*rest, new)) if not any(lost & variables(term) for term in rest) else a


def _rows(value: Value) -> list[list[Value]] | None:
    if isinstance(value, Matrix):
        rows = [list(row) for row in value.rows]
        return [[_scaled(item, value.factor) for item in row] for row in rows] if value.factor else rows
    if not isinstance(value, Ordered) or value.brackets != "[]":
        return None
    inner = [row for row in value.items if isinstance(row, Ordered) and row.brackets == "[]"]
    return [list(row.items) for row in inner] if len(inner) == len(value.items) else None


def _scaled(item: Value, factor: Node) -> Value:
    if not isinstance(item, Scalar):
        raise Unread
    return Scalar(("*", (factor, item.node)), item.unit, item.percent)


def _numbered(value: Unordered) -> bool:
    """x_1 = 3, x_2 = 5: the numbers only count."""
    names = [item.name if isinstance(item, Assignment) and not item.links else "" for item in value.items]
    return all(re.fullmatch(r"[a-z]_\d+", name) for name in names) and len({name[0] for name in names}) == 1


def _unnamed(value: Value) -> Value:
    return value.value if isinstance(value, Assignment) else value


def _as_equation(value: Value) -> tuple[Node, Node] | None:
    if isinstance(value, Equation):
        return value.left, value.right
    if isinstance(value, Assignment) and len(value.name) == 1 and not value.links and isinstance(value.value, Scalar):
        return (("var", value.name), value.value.node) if not value.value.unit else None
    return None


def _as_real_set(value: Value) -> RealSet | None:
    if isinstance(value, RealSet):
        return value
    try:
        return RealSet(tuple(pieces_of(value)))
    except Unread:
        return None


def _solves(value: Value) -> bool:
    """Whether it says what a variable is."""
    return isinstance(value, Assignment) and isinstance(value.value, Scalar) and not variables(value.value.node)


def _isolated(inequality: Inequality) -> bool:
    """2x > 14, but not 2x + 1 > 15, which may be the question."""
    sides = sorted((inequality.left, inequality.right), key=lambda side: len(variables(side)))
    term = sides[1][1] if sides[1][0] == "-" else sides[1]
    factors = term[1] if term[0] == "*" else (term,)
    return not variables(sides[0]) and all(factor[0] == "var" or not variables(factor) for factor in factors)


def _as_inequality(value: Value) -> Inequality | None:
    """Also x > 7, which was read as what it leaves of the line."""
    if isinstance(value, Inequality):
        return value
    if not isinstance(value, RealSet) or not value.variable or len(value.pieces) > 1:
        return None
    piece, name = value.pieces[0], ("var", value.variable)
    if len(value.without) == 1:
        return Inequality(name, value.without[0].node, "!=")
    if isinstance(piece.low, Infinity) and isinstance(piece.high, Scalar):
        return Inequality(name, piece.high.node, "<=" if piece.closed_high else "<")
    if isinstance(piece.low, Scalar) and isinstance(piece.high, Infinity):
        return Inequality(piece.low.node, name, "<=" if piece.closed_low else "<")
    return None


def _position(end: Scalar | Infinity) -> float:
    """Where an end lies, as near as a float can tell: for the order only, never for equality."""
    if isinstance(end, Infinity):
        return end.sign * float("inf")
    value, evaluator = settled(end.node, {}, Fraction(7))
    value = evaluator.inexact(value)
    if value.imag or end.percent:
        raise Unread
    return float(value)


def _in_order(piece: Piece) -> bool:
    low, high = _position(piece.low), _position(piece.high)
    if low == high:
        return (
            piece.low == piece.high
            and piece.closed_low
            and piece.closed_high
            and low not in (float("inf"), -float("inf"))
        )
    return (
        low < high
        and not (piece.closed_low and isinstance(piece.low, Infinity))
        and not (piece.closed_high and isinstance(piece.high, Infinity))
    )
