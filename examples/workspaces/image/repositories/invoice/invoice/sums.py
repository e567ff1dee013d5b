from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

Line = tuple[str, int]
"""An amount, and the rate of its tax in per cent."""


def tax(lines: Iterable[Line]) -> Decimal:
    amounts = [Decimal(amount) * rate / 100 for amount, rate in lines]
    return round(sum(amounts, Decimal(0)), 2)


def total(lines: Iterable[Line]) -> Decimal:
    lines = list(lines)
    return sum((Decimal(amount) for amount, _ in lines), Decimal(0)) + tax(lines)
