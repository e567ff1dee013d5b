"""What only computer algebra can tell, by sympy: sums, products and integrals worked out, differences simplified.

Slow and without bounds: only for a worker process that may be killed. Expressions come as nodes; sympy parses nothing.
"""

from __future__ import annotations

from typing import Any

import sympy

from rewards.math_answer.comparison import Comparison
from rewards.math_answer.nodes import BIG_OPERATORS, Node, holds, variables
from rewards.math_answer.outcomes import Rejected, Undecided
from rewards.math_answer.units import words

_DIGITS = 60
_POINTS = (3, 4, 7)
_FUNCTIONS = {
    "ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec",
    "arccsc": "acsc", "ceil": "ceiling", "max": "Max", "min": "Min",
}  # fmt: skip
_KNOWN = words("sin cos tan cot sec csc sinh cosh tanh coth exp log floor gcd lcm") | set(_FUNCTIONS.values())


class SymbolicComparison(Comparison):
    """A comparison that asks sympy where values at points can't tell."""

    symbolic = False
    """Whether it was asked."""

    def nodes(self, a: Node, b: Node) -> bool:
        try:
            return super().nodes(a, b)
        except Undecided:
            self.symbolic = True
        try:
            return _proven(a, b)
        except MemoryError:
            raise Rejected("memory") from None
        except Exception:  # whatever sympy raises where it can't go on
            raise Undecided from None

    @property
    def path(self) -> str:
        return "sympy" if self.symbolic else super().path


def _proven(a: Node, b: Node) -> bool:
    """True where the difference simplifies to zero and is zero in numbers, False only where it is not in numbers."""
    whole = holds(("", a, b), lambda node: node[0] in (*BIG_OPERATORS, "!", "binom"))
    names = variables(a) | variables(b)
    symbols = {
        name: sympy.Symbol(name, positive=True, integer=True) if whole else sympy.Symbol(name, real=True)
        for name in names
    }
    left, right = _built(a, symbols).doit(), _built(b, symbols).doit()
    gap = left - right
    zero = all(_is_zero(gap.subs({symbol: n + i for i, symbol in enumerate(symbols.values())})) for n in _POINTS)
    if not zero:
        return False
    if sympy.simplify(gap) == 0 or sympy.simplify(gap.rewrite(sympy.exp)) == 0:
        return True
    raise Undecided


def _is_zero(value: Any) -> bool:
    """By many digits. Raises Undecided where it is no number."""
    number = sympy.N(value, _DIGITS, chop=False)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo, sympy.Sum, sympy.Integral, sympy.Product):
        raise Undecided
    return bool(abs(number) < sympy.Float(10) ** (10 - _DIGITS))


def _built(node: Node, symbols: dict[str, Any]) -> Any:
    def of(part: Node) -> Any:
        return _built(part, symbols)

    match node:
        case ("num", value):
            return sympy.Rational(value.numerator, value.denominator)
        case ("var", name):
            return symbols[name]
        case ("const", name):
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[name]
        case ("inf", sign):
            return sympy.oo * sign
        case ("+", terms):
            return sympy.Add(*map(of, terms))
        case ("*", factors):
            return sympy.Mul(*map(of, factors))
        case ("-", a):
            return -of(a)
        case ("/", a, b):
            return of(a) / of(b)
        case ("^", a, b):
            return of(a) ** of(b)
        case ("root", n, a):
            return sympy.real_root(of(a), of(n)) if n[1] % 2 else of(a) ** (1 / of(n))
        case ("|", a):
            return sympy.Abs(of(a))
        case ("!", a):
            return sympy.factorial(of(a))
        case ("binom", n, k):
            return sympy.binomial(of(n), of(k))
        case ("deg", a):
            return of(a) * sympy.pi / 180
        case ("log", base, a):
            return sympy.log(of(a)) / sympy.log(of(base))
        case ("fn", str(name), args) if name != "log" and _FUNCTIONS.get(name, name) in _KNOWN:
            return getattr(sympy, _FUNCTIONS.get(name, name))(*map(of, args))
        case (name, variable, low, high, body) if name in BIG_OPERATORS:
            return _bound(name, variable, (of(low), of(high)), body, symbols)
    raise Undecided


def _bound(name: str, variable: str, limits: tuple[Any, Any], body: Node, symbols: dict[str, Any]) -> Any:
    real = name == "int"
    bound = sympy.Symbol(variable, real=True) if real else sympy.Symbol(variable, integer=True)
    inner = _built(body, {**symbols, variable: bound})
    return {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral}[name](inner, (bound, *limits))
