"""Values of expressions: exact while they are rational, else numbers of as many digits as it takes to tell them apart.

The precision follows the largest and the smallest number that occurs on the way, so that 2^2024 is not 2^2024 - 1 and
cos(10^-30) is not 1. Whatever would take long is over a cap.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rewards.math_answer.nodes import Node
from rewards.math_answer.outcomes import Rejected, Undecided, Undefined
from rewards.math_answer.roots import MAX_BITS, MAX_EXPONENT, rational_root, whole_logarithm

MAX_FACTORIAL = 3000
_GUARD = 192
_SLACK = 32
_ORDERS, _AMPLE = 8, 6000
_MAX_PRECISION = 20_000
_BUDGET = 4_000_000
"""Bits that may be produced for one value; a function of an irrational number counts as twenty operations."""

Number = Any
"""A Fraction, or a real or complex number of mpmath's, which has no types."""

_contexts = threading.local()


class Evaluator:
    """Works out one node after another at one precision, and keeps the size of what occurred."""

    def __init__(self, precision: int, point: Mapping[str, Fraction], log_base: Fraction) -> None:
        self.precision, self.point, self.log_base = precision, point, log_base
        self.peak = 0
        self.spent = 0
        self.unreal = False
        """Whether the logarithm or an even root of a negative number was taken."""
        self._ctx: Any = None

    @property
    def ctx(self) -> Any:
        if self._ctx is None:
            self._ctx = _context()
        if self._ctx.prec != self.precision:
            self._ctx.prec = self.precision
        return self._ctx

    # Bounds

    def exact(self, value: Fraction) -> Fraction:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > 2 * MAX_BITS:
            raise Rejected("too_large")
        self.spend(bits)
        return value

    def spend(self, bits: int) -> None:
        self.spent += bits
        if self.spent > _BUDGET:
            raise Rejected("too_costly")

    def seen(self, value: Number, functions: int = 0) -> Number:
        """Notes the size of an inexact value."""
        self.spend(self.precision * (1 + 20 * functions))
        ctx = self.ctx
        if not ctx.isfinite(value):
            raise Undefined
        for part in (value.real, value.imag):
            if part:
                self.note(abs(ctx.mag(part)))
        return value

    def note(self, bits: int) -> None:
        self.peak = max(self.peak, bits)
        if self.needed > _MAX_PRECISION:
            raise Rejected("too_large")

    def note_negative(self, value: Number) -> None:
        self.unreal = self.unreal or (not hasattr(value, "_mpc_") and bool(value < 0))

    def inexact(self, value: Number) -> Number:
        if not isinstance(value, Fraction):
            return value
        self.note(max(value.numerator.bit_length(), value.denominator.bit_length()))
        return self.ctx.mpf(value.numerator) / value.denominator

    @property
    def needed(self) -> int:
        """The precision at which sin x and x differ for the smallest x that occurred, and so for a few orders more."""
        return _GUARD + max(2 * self.peak, min(_ORDERS * self.peak, _AMPLE))

    def value(self, node: Node) -> Number:
        return _RULES[node[0]](self, *node[1:])

    # Arithmetic

    def number(self, value: Fraction) -> Number:
        return self.exact(value)

    def variable(self, name: str) -> Number:
        return self.point[name]

    def constant(self, name: str) -> Number:
        ctx = self.ctx
        return {"pi": lambda: +ctx.pi, "e": lambda: +ctx.e, "i": lambda: ctx.mpc(0, 1)}[name]()

    def negative(self, node: Node) -> Number:
        return -self.value(node)

    def sum(self, terms: tuple[Node, ...]) -> Number:
        total = self.value(terms[0])
        for term in terms[1:]:
            total = self.plus(total, self.value(term))
        return total

    def plus(self, a: Number, b: Number) -> Number:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return self.exact(a + b)
        a, b = self.inexact(a), self.inexact(b)
        total, ctx = self.ctx.mpmathify(a + b), self.ctx
        # What is left of a cancellation to the last bits is zero.
        floor = self.peak - self.precision + _SLACK
        real = ctx.zero if total.real and ctx.mag(total.real) < floor else total.real
        imag = ctx.zero if total.imag and ctx.mag(total.imag) < floor else total.imag
        return self.seen(ctx.mpc(real, imag) if imag else real)

    def product(self, factors: tuple[Node, ...]) -> Number:
        value = self.value(factors[0])
        for factor in factors[1:]:
            value = self.times(value, self.value(factor))
        return value

    def times(self, a: Number, b: Number) -> Number:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return self.exact(a * b)
        return self.seen(self.tidy(self.inexact(a) * self.inexact(b)))

    def tidy(self, value: Number) -> Number:
        """A complex number without the part that is only rounding."""
        ctx = self.ctx
        if not hasattr(value, "_mpc_"):
            return value
        floor = ctx.mag(value) - self.precision + _SLACK if value else 0
        if not value.imag or ctx.mag(value.imag) < floor:
            return value.real
        return ctx.mpc(0, value.imag) if value.real and ctx.mag(value.real) < floor else value

    def quotient(self, top: Node, bottom: Node) -> Number:
        a, b = self.value(top), self.value(bottom)
        if not b:
            raise Undefined
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return self.exact(a / b)
        return self.seen(self.tidy(self.inexact(a) / self.inexact(b)))

    def power(self, base: Node, exponent: Node) -> Number:
        b = self.value(exponent)
        if base == ("const", "e"):
            return self.exponential(b)
        a = self.value(base)
        if not a:
            if isinstance(b, Fraction) and b > 0:
                return Fraction(0)
            raise Undefined
        if isinstance(b, Fraction) and b.denominator == 1:
            return self.integer_power(a, b.numerator)
        if isinstance(b, Fraction) and isinstance(a, Fraction) and a > 0 and b.denominator < 100:
            rooted = rational_root(a, b.denominator)
            if rooted is not None:
                return self.integer_power(rooted, b.numerator)
        a, b = self.inexact(a), self.inexact(b)
        ctx = self.ctx
        self.note_negative(a)
        logarithm = ctx.log(a)
        if ctx.mag(b) + ctx.mag(logarithm) > 16:
            raise Rejected("too_large")
        return self.seen(self.tidy(ctx.exp(b * logarithm)), functions=2)

    def integer_power(self, base: Number, exponent: int) -> Number:
        if isinstance(base, Fraction):
            if abs(base) == 1:
                return base if exponent % 2 else Fraction(1)
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) > MAX_EXPONENT or (size - 1) * abs(exponent) > MAX_BITS:
                raise Rejected("too_large")
            return self.exact(base**exponent)
        if abs(exponent) > MAX_EXPONENT or abs(exponent * self.ctx.mag(base)) > _MAX_PRECISION:
            raise Rejected("too_large")
        return self.seen(self.tidy(base**exponent), functions=1)

    def exponential(self, value: Number) -> Number:
        if isinstance(value, Fraction) and not value:
            return Fraction(1)
        value, ctx = self.inexact(value), self.ctx
        if value and ctx.mag(value) > 14:
            raise Rejected("too_large")
        return self.seen(self.tidy(ctx.exp(value)), functions=1)

    def root(self, degree: Node, node: Node) -> Number:
        n, value = self.value(degree), self.value(node)
        if not (isinstance(n, Fraction) and n.denominator == 1 and 2 <= n <= 1000):
            raise Undecided
        order = int(n)
        if not value:
            return Fraction(0)
        if isinstance(value, Fraction):
            exact = rational_root(abs(value), order)
            if exact is not None and (value > 0 or order % 2):
                return exact if value > 0 else -exact
        value, ctx = self.inexact(value), self.ctx
        if not hasattr(value, "_mpc_") and value < 0 and order % 2:
            return self.seen(-ctx.root(-value, order), functions=1)
        self.note_negative(value)
        return self.seen(self.tidy(ctx.root(value, order) if order > 2 else ctx.sqrt(value)), functions=1)

    def factorial(self, node: Node) -> Number:
        value = self.value(node)
        if not isinstance(value, Fraction) or value.denominator != 1:
            raise Undecided
        if value < 0:
            raise Undefined
        if value > MAX_FACTORIAL:
            raise Rejected("too_large")
        return self.exact(Fraction(math.factorial(int(value))))

    def binomial(self, top: Node, bottom: Node) -> Number:
        n, k = self.value(top), self.value(bottom)
        whole = isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1
        if not whole or k < 0 or n < 0:
            raise Undecided
        smaller = min(k, n - k)
        if smaller > MAX_FACTORIAL or smaller * int(n).bit_length() > MAX_BITS:
            raise Rejected("too_large")
        return self.exact(Fraction(math.comb(int(n), int(k))))

    def modulus(self, node: Node) -> Number:
        value = self.value(node)
        return abs(value) if isinstance(value, Fraction) else self.seen(abs(value), functions=1)

    def degrees(self, node: Node) -> Number:
        return self.times(self.times(self.value(node), Fraction(1, 180)), self.constant("pi"))

    def remainder(self, a: Node, b: Node) -> Number:
        x, m = self.value(a), self.value(b)
        if not (isinstance(x, Fraction) and isinstance(m, Fraction)) or x.denominator != 1 or m.denominator != 1:
            raise Undecided
        if m <= 0:
            raise Undefined
        return self.exact(x % m)

    def logarithm(self, base: Node | None, node: Node) -> Number:
        value = self.value(node)
        b = self.log_base if base is None else self.value(base)
        if not value or not b or b == 1:
            raise Undefined
        if isinstance(value, Fraction) and value == 1:
            return Fraction(0)
        if isinstance(value, Fraction) and isinstance(b, Fraction) and value > 0 and b > 0:
            whole = whole_logarithm(value, b)
            if whole is not None:
                return whole
        return self.seen(self.tidy(self.log(value) / self.log(b)))

    def log(self, value: Number) -> Number:
        value = self.inexact(value)
        self.note_negative(value)
        return self.seen(self.tidy(self.ctx.log(value)), functions=1)

    def function(self, name: str, args: tuple[Node, ...]) -> Number:
        if name in ("gcd", "lcm", "max", "min"):
            return self.of_many(name, [self.value(arg) for arg in args])
        if name == "log":
            return self.logarithm(None, args[0])
        if name == "lg":
            return self.logarithm(("num", Fraction(10)), args[0])
        if name == "exp":
            return self.exponential(self.value(args[0]))
        value = self.value(args[0])
        if name in ("floor", "ceil"):
            return self.rounded(name, value)
        if name == "ln":
            if not value:
                raise Undefined
            return Fraction(0) if isinstance(value, Fraction) and value == 1 else self.log(value)
        return self.transcendental(name, value)

    def of_many(self, name: str, values: list[Number]) -> Number:
        if not all(isinstance(value, Fraction) for value in values):
            raise Undecided
        if name in ("max", "min"):
            return max(values) if name == "max" else min(values)
        if any(value.denominator != 1 for value in values):
            raise Undecided
        return self.exact(Fraction((math.gcd if name == "gcd" else math.lcm)(*(int(value) for value in values))))

    def rounded(self, name: str, value: Number) -> Number:
        if not isinstance(value, Fraction):
            nearest = self.ctx.nint(value.real)
            if value.imag or abs(value - nearest) < self.ctx.ldexp(1, self.peak - self.precision + _SLACK):
                raise Undecided
            value = Fraction(int(self.ctx.floor(value)) * 2 + 1, 2)
        return Fraction(math.floor(value) if name == "floor" else math.ceil(value))

    def transcendental(self, name: str, value: Number) -> Number:
        value, ctx = self.inexact(value), self.ctx
        size = ctx.mag(value) if value else 0
        if size > 12:
            raise Rejected("too_large")
        if name.endswith("h"):  # they come near 1 as fast as e^-2x comes near 0
            self.note(4 << max(size, 0))
        try:
            result = getattr(ctx, _FUNCTIONS[name])(value)
        except (ZeroDivisionError, ValueError) as error:
            raise Undefined from error
        # A sine or cosine of about 1 that is next to nothing is zero.
        result = self.snapped(result)
        return self.seen(self.tidy(result), functions=2)

    def snapped(self, value: Number) -> Number:
        ctx = self.ctx
        if value and ctx.mag(value) < self.peak - self.precision + _SLACK:
            return ctx.zero
        if value and ctx.mag(value) > self.precision - self.peak - _SLACK:
            raise Undefined  # a pole, missed by rounding
        return value


_FUNCTIONS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc", "sinh": "sinh",
    "cosh": "cosh", "tanh": "tanh", "coth": "coth", "sech": "sech", "csch": "csch",
}  # fmt: skip

_RULES: dict[str, Callable[..., Number]] = {
    "num": Evaluator.number, "var": Evaluator.variable, "const": Evaluator.constant, "-": Evaluator.negative,
    "+": Evaluator.sum, "*": Evaluator.product, "/": Evaluator.quotient, "^": Evaluator.power, "root": Evaluator.root,
    "!": Evaluator.factorial, "binom": Evaluator.binomial, "|": Evaluator.modulus, "deg": Evaluator.degrees,
    "mod": Evaluator.remainder, "log": Evaluator.logarithm, "fn": Evaluator.function,
}  # fmt: skip


def _context() -> Any:
    """Threads and verdicts inside one another share no precision."""
    context = getattr(_contexts, "mp", None)
    if context is None:
        from mpmath import MPContext

        context = _contexts.mp = MPContext()
    return context


def settled(
    node: Node, point: Mapping[str, Fraction], log_base: Fraction, precision: int = _GUARD
) -> tuple[Number, Evaluator]:
    """The value at a point, at the precision that its own intermediate values ask for.

    Raises Rejected, Undefined or Undecided.
    """
    while True:
        evaluator = Evaluator(precision, point, log_base)
        value: Number = None
        try:
            value = evaluator.value(node)
        except KeyError as unknown:
            raise Undecided from unknown
        except (Undefined, ZeroDivisionError, OverflowError) as error:
            # Too few digits may make a zero of what is none.
            if evaluator.needed <= precision:
                raise Undefined from error
        if evaluator.needed <= precision:
            return value, evaluator
        precision = evaluator.needed


def difference(
    nodes: tuple[Node, Node], point: Mapping[str, Fraction], log_base: Fraction
) -> tuple[Number, Number, Number]:
    """(a, b, a - b) at a point, where the difference is 0 if there is none at the precision that a and b ask for."""
    precision = _GUARD
    while True:
        (a, left), (b, right) = (settled(node, point, log_base, precision) for node in nodes)
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return a, b, a - b
        a, b = left.inexact(a), right.inexact(b)
        needed = max(left.precision, right.precision, left.needed, right.needed)
        precision = needed
        if needed == left.precision == right.precision:
            break
    gap, ctx = a - b, left.ctx
    peak = max(left.peak, right.peak)
    return a, b, ctx.zero if not gap or ctx.mag(gap) < peak - precision + _SLACK else gap
