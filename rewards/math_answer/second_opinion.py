"""What math-verify says about two answers that are undecided. Only for a worker process that may be killed.

It gets formulas, no words, and reads them as LaTeX: its other reader hands text to Python. It drops units, takes the
last part of an equation and compares rounded numbers; so none of these are asked about, and it has to say yes both ways
round, by thirty digits.
"""

from __future__ import annotations

import re
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

_FORMULAS = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
        ),
    )
]
_DIGITS = 30
_UNASKED = re.compile(
    r"[^ -~]|[=<>%$~']|\\(?:[lg]eq?|ne(?:q|g)?|approx|text|%|\$)(?![a-z])|(?<![A-Za-z\\])[A-Za-z]{2,}"
    r"|\d \d|!!|/\d+[A-Za-z\\]|\^\d\d"
)
"""Words, units, percentages, money, relations, digits that only a space keeps apart, and what has two readings."""


def confirms(answer: str, gold: str) -> bool:
    """Of two normal forms: whether they are the same. Raises whatever math-verify raises."""
    if _UNASKED.search(answer) or _UNASKED.search(gold):
        return False
    one, other = _read(answer), _read(gold)
    return bool(one) and bool(other) and _same(one, other) and _same(other, one)


def _read(formula: str) -> Any:
    return parse(
        f"${formula}$", _FORMULAS, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )


def _same(gold: Any, answer: Any) -> bool:
    return bool(
        verify(
            gold, answer, float_rounding=_DIGITS, numeric_precision=_DIGITS, timeout_seconds=None, raise_on_error=True
        )
    )
