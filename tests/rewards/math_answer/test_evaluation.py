"""Numbers: what differs in the thousandth digit differs, and what would take long is refused at once."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.math_answer import verify
from rewards.math_answer.evaluation import settled
from rewards.math_answer.expression import parse
from rewards.math_answer.outcomes import Rejected, Undefined
from rewards.math_answer.tokens import tokenise

SLOW = [
    (",".join(rf"\sqrt{{{n}}}" for n in range(1001, 1065)), ",".join(rf"\sqrt{{{n}}}" for n in range(2001, 2065))),
    ("*".join(["99^{2000}"] * 90), "3"),
    ("+".join(rf"\pi^{{{n}}}" for n in range(1000, 1080)), "3"),
    ("*".join(["(x+1)^{900}"] * 40), "x"),
    ("+".join(["e^{x^{9}}"] * 80), "x"),
    ("+".join(rf"\tan({n}\pi x)" for n in range(10, 80)), "x"),
    (r"\tanh(4000)" + r"+\tanh(4000)" * 80, r"\tanh(3999)"),
    ("*".join(["2999!"] * 160), "3"),
    (r"\cup".join(f"({n},{n + 1})" for n in range(60)), "(0,60)"),
    ("(1+" * 39 + "x" + ")^{5}" * 39, "x"),
    (r"\sin" * 200 + "x", "x"),
    ("|x" * 300, "1"),
    ("1:" * 400 + "1", "1"),
]


@pytest.mark.parametrize(("answer", "gold"), SLOW, ids=lambda text: text[:16])
def test_no_answer_takes_a_second(answer: str, gold: str) -> None:
    started = time.process_time()
    assert not verify(rf"\boxed{{{answer}}}", gold).correct
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("answer", "gold", "reason"),
    [
        (",".join(map(str, range(30))), ",".join(map(str, range(29, -1, -1))), "rejected:too_many_comparisons"),
        ("+".join(rf"\pi^{{{n}}}" for n in range(1000, 1080)), "3", "rejected:too_costly"),
        (r"10^{4900}\sqrt{2}", "3", "rejected:too_large"),
    ],
)
def test_work_is_counted_and_cut(answer: str, gold: str, reason: str) -> None:
    assert verify(rf"\boxed{{{answer}}}", gold).reason == reason


def value(text: str) -> object:
    return settled(parse(tokenise(text)), {}, Fraction(7))[0]


def test_what_is_rational_is_exact() -> None:
    assert value("1+2*3") == 7
    assert value("-2^2") == -4
    assert value(r"\sqrt{\frac{4}{9}}") == Fraction(2, 3)
    assert value(r"\log_2 32") == 5
    assert value(r"\sqrt[3]{-8}") == -2
    assert value(r"\binom{6}{2}-3!") == 9


@pytest.mark.parametrize("text", ["1/0", r"\frac{1}{\sqrt{2}\sqrt{2}-2}", r"\tan(\pi/2)", r"\ln 0", "0^{-1}", "0^0"])
def test_what_has_no_value_is_undefined(text: str) -> None:
    with pytest.raises(Undefined):
        value(text)


def test_a_small_number_is_not_taken_for_zero() -> None:
    assert value(r"\frac{1}{\sqrt{2}+10^{-70}-\sqrt{2}}")


@pytest.mark.parametrize(
    "text", ["2^{99999}", "9999!", r"\binom{9999999}{5000000}", r"e^{99999}", r"\pi^{99999}", "1e9999"]
)
def test_what_is_too_large_is_rejected(text: str) -> None:
    with pytest.raises(Rejected, match="too_large"):
        value(text)


@given(st.integers(1, 10**30), st.integers(1, 400))
def test_neighbours_differ_at_any_size(n: int, power: int) -> None:
    big = n**power % 10**400 + 2
    assert not verify(rf"\boxed{{{big}}}", str(big + 1)).correct
    assert verify(rf"\boxed{{{big}}}", f"{big:,}").correct
    assert not verify(rf"\boxed{{\sqrt{{{big}}}}}", rf"\sqrt{{{big + 1}}}").correct
    assert verify(rf"\boxed{{\frac{{1}}{{\sqrt{{{big}}}}}}}", rf"\sqrt{{\frac{{1}}{{{big}}}}}").correct
