from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from rewards.comparison import differing_token, same_lines, same_value


@pytest.mark.parametrize(
    ("output", "expected", "agrees"),
    [
        ("1 2\r\n3  \n\n", "1 2\n3", True),
        ("0.3333333", "0.33333331", True),
        ("0.3334", "0.33333331", False),
        ("1000001", "1000000.0", True),
        ("1000000", "1000001", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("+7", "7", True),
        ("0101", "101", False),
        ("9007199254740992", "9007199254740993", False),
        ("1_000", "1000", False),
        ("1_000.0", "1000.0", False),
        ("nan", "0.5", False),
        ("inf", "1e308", False),
        ("0x1p0", "1.0", False),
        ("1e999999999", "1.5e999999999", False),
        ("1e-9", "0.0", True),
        ("1.5abc", "1.5", False),
        ("1 2 3", "1 2", False),
        ("1 2", "1 2 3", False),
        ("", "1", False),
        ("yes", "YES", False),
    ],
)
def test_tokens(output: str, expected: str, agrees: bool) -> None:
    assert (differing_token(output.encode(), expected.encode()) is None) == agrees


def test_output_much_longer_than_expected_is_wrong_unless_it_is_blank() -> None:
    assert differing_token(b"1 " * 1_000_000, b"1") == 2
    assert differing_token(b"1" + b"\n" * 1_000_000, b"1") is None
    assert differing_token(b" " * 1_000_000 + b"2", b"1") == 1
    assert differing_token(b" " * 1_000_000 + b"1 " + b" " * 1_000_000 + b"2", b"1 2") is None


def test_differing_token_is_counted_from_one() -> None:
    assert differing_token(b"1 2 4", b"1 2 3") == 3
    assert differing_token(b"1", b"1 2") == 2


def test_exact_tokens_know_no_tolerance() -> None:
    assert differing_token(b"0.50", b"0.5", tolerant=False) == 1


def test_lines_need_breaks_in_the_same_places() -> None:
    assert same_lines(b"1 2 \n\n3\n", b"1 2\n3")
    assert not same_lines(b"1\n2 3", b"1 2\n3")


@pytest.mark.parametrize(
    ("value", "expected", "agrees"),
    [
        (((0, 0), [1, 1]), [[0, 0], [1, 1]], True),
        (3.0, 3, True),
        (3, 3.0, True),
        (2.9999999, 3, False),
        ([0.1 + 0.2], [0.3], True),
        ({"a": 1e9 + 1}, {"a": 1e9}, True),
        (math.nan, math.nan, True),
        (math.inf, 1e308, False),
        (math.inf, math.inf, True),
        (True, 1, False),
        (0, False, False),
        (None, 0, False),
        ("1", 1, False),
        (1, [1, 2], False),
        ({1: "a"}, {"1": "a"}, False),
        ({1: "a"}, {True: "a"}, False),
        ({1: 2, 2: 1}, dict(Counter([1, 1, 2])), True),
        ({3, 1, 2}, [1, 2, 3], False),
        ({3, 1, 2}, {1, 2, 3}, True),
        (b"ab", "ab", False),
        (9007199254740992, 9007199254740993, False),
        (9007199254740992.0, 9007199254740993, False),
        (2, 2 + 1e-17j, True),
        (10**400, 1 + 1j, False),
    ],
)
def test_values(value: Any, expected: Any, agrees: bool) -> None:
    assert same_value(value, expected) == agrees


def test_unordered_keeps_multiplicities_and_tolerance() -> None:
    assert same_value([3, 1, 2], [1, 2, 3], unordered=True)
    assert same_value({3, 1, 2}, [1, 2, 3], unordered=True)
    assert same_value([0.1 + 0.2, 1], [1, 0.3], unordered=True)
    assert not same_value([1, 1, 2], [1, 2, 2], unordered=True)
    assert not same_value([[2, 1]], [[1, 2]], unordered=True)
    assert not same_value([True], [1], unordered=True)
