"""Whether the final answer in a text is the gold answer. Exact, without executing anything, and fail closed.

`extraction` finds the answer, `normal` gives it one spelling within caps, `tokens` and `expression` parse it, `reading`
and `scalars` make a typed value of it, `evaluation` works out numbers, `comparison` compares by type, `verdict` says
what came of it. What is not read completely is `undecided`, which is not correct; `workers` asks sympy about it, in
processes that can be killed, and beside an event loop judges all answers there.
"""

from rewards.math_answer.extraction import extract
from rewards.math_answer.guessing import guessable
from rewards.math_answer.normal import MAX_ANSWER_CHARS
from rewards.math_answer.verdict import Options, Verdict, gold_problem, verify
from rewards.math_answer.workers import Workers, need_math_verify

__all__ = [
    "MAX_ANSWER_CHARS",
    "Options",
    "Verdict",
    "Workers",
    "extract",
    "gold_problem",
    "guessable",
    "need_math_verify",
    "verify",
]
