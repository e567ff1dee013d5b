"""One value in any spelling is equal to itself in any other, and to no neighbour; whatever is written is judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.math_answer import verify

WHOLE: list[Callable[[int], str]] = [
    str,
    "{:,}".format,
    lambda n: f"{n:,}".replace(",", "{,}"),
    lambda n: f"{n:,}".replace(",", r"\,"),
    lambda n: f"{n}.0",
    lambda n: f"{n}.",
    lambda n: f"${n}$",
    lambda n: rf"\({n}\)",
    lambda n: rf"\text{{{n}}}",
    lambda n: rf"\mathbf{{{n}}}",
    lambda n: rf"\left({n}\right)",
    lambda n: rf"\displaystyle {n}",
    lambda n: rf"\frac{{{3 * n}}}{{3}}",
    lambda n: f"{7 * n}/7",
    lambda n: f"{n - 2}+2",
    lambda n: f"{{{n}}}^{{1}}" if n >= 0 else f"-{{{-n}}}^{{1}}",
    lambda n: str(n).replace("-", "−"),
    lambda n: "".join(chr(0xFF10 + int(c)) if c.isdigit() else c for c in str(n)),
    lambda n: "".join(chr(0x660 + int(c)) if c.isdigit() else c for c in str(n)),
    lambda n: f"x = {n}",
    lambda n: rf"{n}\,",
    lambda n: f"  {n}\n",
    lambda n: f"{100 * n}\\%",
]
BROKEN: list[Callable[[Fraction], str]] = [
    lambda q: f"{q.numerator}/{q.denominator}",
    lambda q: rf"\frac{{{q.numerator}}}{{{q.denominator}}}",
    lambda q: rf"\dfrac{{{2 * q.numerator}}}{{{2 * q.denominator}}}",
    lambda q: rf"\frac{{{-q.numerator}}}{{-{q.denominator}}}",
    lambda q: rf"{'-' if q < 0 else ''}\tfrac {{ {abs(q.numerator)} }} {{ {q.denominator} }}",
    lambda q: rf"{q.numerator} \div {q.denominator}",
    lambda q: rf"{q.numerator} \cdot {q.denominator}^{{-1}}",
    lambda q: f"{q.numerator}⁄{q.denominator}",
    lambda q: rf"{q.numerator}\left(\frac{{1}}{{{q.denominator}}}\right)",
    lambda q: rf"\frac{{{q.numerator + q.denominator}}}{{{q.denominator}}} - 1",
]
ROOTS: list[Callable[[int, int], str]] = [
    lambda a, b: rf"{a}\sqrt{{{b}}}",
    lambda a, b: rf"{a} \cdot {b}^{{1/2}}",
    lambda a, b: rf"\sqrt{{{a * a * b}}}",
    lambda a, b: f"{a}√{b}",
    lambda a, b: rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}",
    lambda a, b: rf"\sqrt{{{b}}}\times {a}",
    lambda a, b: rf"{a}\sqrt[4]{{{b}^2}}",
    lambda a, b: f"{a}*sqrt({b})",
]
numbers = st.integers(-(10**12), 10**12) | st.integers(-999, 999)
fractions = st.fractions(max_denominator=10**6).filter(lambda q: q.denominator > 1)


def equal(answer: str, gold: str) -> bool:
    verdict = verify(rf"so \boxed{{{answer}}}", gold)
    assert verdict.scored, verdict
    return verdict.correct


@given(numbers, st.sampled_from(WHOLE), st.sampled_from(WHOLE))
def test_whole_numbers_in_any_two_spellings(n: int, one: Callable[[int], str], other: Callable[[int], str]) -> None:
    assert equal(one(n), other(n)), (one(n), other(n))
    assert not equal(one(n), other(n + 1))
    assert not equal(one(n - 1), other(n))
    assert n == 0 or not equal(one(n), other(-n))


@settings(max_examples=50)
@given(fractions, st.sampled_from(BROKEN), st.sampled_from(BROKEN))
def test_fractions_in_any_two_spellings(
    q: Fraction, one: Callable[[Fraction], str], other: Callable[[Fraction], str]
) -> None:
    assert equal(one(q), other(q)), (one(q), other(q))
    assert not equal(one(q), other(q + Fraction(1, 10**6)))
    assert not equal(one(q), other(1 / q)) or abs(q) == 1


@settings(max_examples=50)
@given(st.integers(2, 999), st.integers(2, 999), st.sampled_from(ROOTS), st.sampled_from(ROOTS))
def test_roots_in_any_two_spellings(
    a: int, b: int, one: Callable[[int, int], str], other: Callable[[int, int], str]
) -> None:
    assert equal(one(a, b), other(a, b)), (one(a, b), other(a, b))
    assert not equal(one(a, b), other(a, b + 1))
    assert not equal(one(a + 1, b), other(a, b))


@settings(max_examples=50)
@given(st.lists(numbers, min_size=2, max_size=6, unique=True), st.randoms())
def test_sets_in_any_order_and_tuples_in_one(items: list[int], random: object) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = ", ".join(map(str, items)), ", ".join(map(str, shuffled))
    assert equal(rf"\{{{one}\}}", rf"\{{{other}\}}")
    assert equal(f"({one})", f"({other})") == (items == shuffled)
    assert not equal(rf"\{{{one}\}}", rf"\{{{other}, {max(items) + 1}\}}")


ANY = st.text(max_size=80) | st.text(alphabet="\\{}[]()^_$&%=<>,.;:!|+-*/ 0123456789xyzfracsqrtboxednt\n", max_size=80)


@given(ANY, ANY, st.booleans(), st.sampled_from([None, "choice"]), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_whatever_is_written_gets_a_verdict_in_time(
    text: str, gold: str, anchors: bool, kind: str | None, flag: bool, tolerance: float
) -> None:
    began = time.thread_time()
    for said in (text, rf"\boxed{{{text}}}"):
        verdict = verify(said, gold, anchors=anchors, answer_type=kind, multi=flag, decimals=flag, rel_tol=tolerance)
        assert verdict.reason
    assert time.thread_time() - began < 2
