"""How easily a gold answer is guessed: where a few tries are enough, a second one is no reasoning."""

from __future__ import annotations

from fractions import Fraction

from rewards.math_answer.evaluation import settled
from rewards.math_answer.nodes import variables
from rewards.math_answer.outcomes import NoAnswer, Rejected, Undecided, Undefined, Unread
from rewards.math_answer.tokens import tokenise
from rewards.math_answer.values import Assignment, Infinity, Scalar, Symbol, Text
from rewards.math_answer.verdict import Options, read_gold

_SMALL = 100
_FEW_TOKENS = 2


def guessable(gold: str, options: Options) -> bool:
    """Choices, words, signs, fractions of numbers below 100, and what is written with one or two signs."""
    if options.answer_type == "choice":
        return True
    try:
        read = read_gold(gold)
    except (NoAnswer, Rejected):
        return True
    value = read.value.value if isinstance(read.value, Assignment) else read.value
    if value is None or isinstance(value, Text | Symbol | Infinity):
        return True
    if not isinstance(value, Scalar):
        return False
    number = None
    if not variables(value.node):
        try:
            number = settled(value.node, {}, Fraction(7))[0]
        except (Undecided, Undefined, Rejected):
            return False
    if isinstance(number, Fraction | int):
        number = Fraction(number)
        return abs(number.numerator) < _SMALL and number.denominator < _SMALL
    try:
        return len(tokenise(read.normal)) <= _FEW_TOKENS
    except Unread:
        return True
