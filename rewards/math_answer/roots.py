"""Roots and logarithms of rational numbers that are rational again."""

from __future__ import annotations

import math
from fractions import Fraction

MAX_EXPONENT = 5000
MAX_BITS = 40_000


def rational_root(value: Fraction, order: int) -> Fraction | None:
    top, bottom = _integer_root(value.numerator, order), _integer_root(value.denominator, order)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, order: int) -> int | None:
    if order == 2:
        root = math.isqrt(value)
    else:
        low, high = 0, 1 << -(-value.bit_length() // order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**order <= value else (low, middle - 1)
        root = low
    return root if root**order == value else None


def whole_logarithm(value: Fraction, base: Fraction) -> Fraction | None:
    guess = (_log2(value)) / (_log2(base) or math.inf)
    whole = round(guess) if abs(guess) < MAX_EXPONENT else 0
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if not whole or abs(whole) * size > MAX_BITS or base**whole != value:
        return None
    return Fraction(whole)


def _log2(value: Fraction) -> float:
    return math.log2(value.numerator) - math.log2(value.denominator)
