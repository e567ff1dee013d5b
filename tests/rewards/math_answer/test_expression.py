"""Expressions are read whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.math_answer import verify
from rewards.math_answer.expression import parse
from rewards.math_answer.nodes import variables
from rewards.math_answer.outcomes import Unread
from rewards.math_answer.tokens import tokenise


@pytest.mark.parametrize(
    "text",
    [
        "1+", "(1", "1)", "1..2", "3!!", "2 3", "1/2x", r"\frac12 3", r"\sin x(1+x)", "10^12", r"\log_23", "f(x+1)",
        r"\frac{1}",
        r"\sqrt", "^^", "x'", r"\lim x", r"5\frac{7}{4}", r"\sin^{-2}x", "*2", "2**", "", "{", "|x",
    ],
)  # fmt: skip
def test_what_has_two_readings_or_none_is_unread(text: str) -> None:
    with pytest.raises(Unread):
        parse(tokenise(text))


def test_letters_are_variables_words_or_functions() -> None:
    assert variables(parse(tokenise("xyz+abc"))) == set("xyzabc")
    assert variables(parse(tokenise("e^{i}+pi"))) == set()
    assert variables(parse(tokenise(r"a_1+a_{n+1}+\theta"))) == {"a_1", "a_n+1", "theta"}
    assert [token.kind for token in tokenise("listen")] == ["word"]
    assert [token.kind for token in tokenise("sin x")] == ["fn", "let"]
    assert [token.kind for token in tokenise("5cm")] == ["num", "word"]


def test_only_what_is_written_as_thousands_is_one_number() -> None:
    def numbers(text: str) -> list[object]:
        return [token.value for token in tokenise(text) if token.kind == "num"]

    assert numbers("1,234,567.5") == [1234567.5]
    assert numbers("1 234") == [1234]
    assert numbers("(1,234)") == [1, 234]
    assert numbers("1, 234") == [1, 234]
    assert numbers("1,23") == [1, 23]
    assert numbers("12 34") == [12, 34]
    assert numbers(r"\log_2 320") == [2, 320]


PIECES = [
    r"\frac", r"\sqrt", r"\sin", "{", "}", "{2}", "x", "3", "+", "^", "_", r"\left(", r"\right)", ",", r"\cup", "[",
    r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", r"\text{cm}", r"\pm", "=", r"\le", "!", r"\{", r"\}", "|",
    " ", ")",
    r"\infty", "n", "/", r"\%", r"\$", "-", "or", ":", r"\log", "0", "\ue000",
]  # fmt: skip
GOLDS = [
    "3",
    "x",
    "(2,3)",
    r"\{2,3\}",
    "x<3",
    "y=x",
    r"(-\infty,3]",
    "3\\%",
    r"\begin{pmatrix}3&2\end{pmatrix}",
    "n!",
    "3:2",
    "3_4",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(GOLDS))
def test_any_latex_gets_a_verdict(pieces: list[str], gold: str) -> None:
    answer = " ".join(pieces)
    assert verify(rf"\boxed{{{answer}}}", gold).scored
    verify(rf"\boxed{{{gold}}}", answer)


@given(st.lists(st.sampled_from(PIECES), max_size=10), st.lists(st.sampled_from(PIECES), max_size=10))
def test_equality_is_symmetric(a: list[str], b: list[str]) -> None:
    one, other = " ".join(a), " ".join(b)
    there, back = verify(rf"\boxed{{{one}}}", other), verify(rf"\boxed{{{other}}}", one)
    if {"equal:num", "equal:set", "equal:tuple"} & {there.reason} and back.scored:
        assert back.correct
