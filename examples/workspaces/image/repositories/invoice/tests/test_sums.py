from decimal import Decimal

from invoice import tax, total


def test_tax():
    assert tax([("100.00", 19), ("50.00", 7)]) == Decimal("22.50")


def test_total():
    assert total([("10.00", 19)]) == Decimal("11.90")
