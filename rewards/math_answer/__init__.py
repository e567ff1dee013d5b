"""Whether the final answer in a text is the gold answer. Exact, without executing anything, and fail closed.

`extraction` finds the answer, `normal` gives it one spelling within caps, `tokens` and `expression` parse it, `reading`
and `scalars` make a typed value of it, `evaluation` works out numbers, `comparison` compares by type, `verdict` says
what came of it. What is not read completely is `undecided`, which is not correct.
"""

from rewards.math_answer.extraction import extract
from rewards.math_answer.normal import MAX_ANSWER_CHARS
from rewards.math_answer.verdict import Verdict, usable, verify

__all__ = ["MAX_ANSWER_CHARS", "Verdict", "extract", "usable", "verify"]
