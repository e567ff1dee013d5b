"""The verdict on one answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rewards.math_answer.choice import LETTERS, chosen
from rewards.math_answer.comparison import Comparison
from rewards.math_answer.evaluation import settled
from rewards.math_answer.extraction import WINDOW, extract, find_boxes, last_boxes
from rewards.math_answer.nodes import variables
from rewards.math_answer.normal import normal_form, same_text
from rewards.math_answer.outcomes import NoAnswer, Rejected, Undecided, Undefined, Unread
from rewards.math_answer.reading import read
from rewards.math_answer.values import Assignment, Ordered, Scalar, Unordered, Value

_SHOWN = 200
UNSCORED = ("gold_invalid", "worker_died", "starved")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verdict. `reason` is for records: it may tell about the gold answer, so the model never reads it."""

    correct: bool
    reason: str
    """`equal:*`, `different:*`, `no_answer:*`, `rejected:*`, `undecided`, `timeout`; and where nothing was learned
    about the answer `gold_invalid`, `worker_died`, `starved` (the machine gave the worker no time)."""
    extracted: str | None
    """The answer as it was found, at most 200 characters."""
    path: str
    """What decided: "extraction", "caps", "text", "fraction", "parser", "sympy", "math-verify" or "none"."""
    ms: float

    @property
    def scored(self) -> bool:
        """False where nothing was learned about the answer: never to be read as reward 0."""
        return self.reason not in UNSCORED


@dataclass(frozen=True, slots=True)
class Options:
    """What a task may ask for beyond exact equality."""

    anchors: bool = True
    answer_type: str | None = None
    choices: str = LETTERS
    multi: bool = False
    rel_tol: float = 0.0
    decimals: bool = False
    second_opinion: bool = False
    """Whether math-verify is asked about what sympy leaves undecided too; only `Workers` asks either of them."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Options:
        """Those that a row of a file names; other fields are left alone. Raises ValueError with the name."""
        given = {name: row[name] for name in OPTIONS if name in row}
        for name, value in given.items():
            right, remedy = _RIGHT[name]
            if not right(value):
                raise ValueError(f"{name} is {value!r:.80}; write {remedy}")
        return cls(**given)


OPTIONS = tuple(field.name for field in fields(Options))
_SWITCH = (lambda value: isinstance(value, bool), "true or false")
_RIGHT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "anchors": _SWITCH,
    "answer_type": (lambda value: value in (None, "choice", "math"), '"choice", or "math", or leave it out'),
    "choices": (
        lambda value: isinstance(value, str) and value.isascii() and value.isalpha() and value.isupper(),
        "the letters that there are, as in 'ABCD'",
    ),
    "multi": _SWITCH,
    "rel_tol": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1,
        "a share of the gold answer from 0 to less than 1",
    ),
    "decimals": _SWITCH,
    "second_opinion": _SWITCH,
}


def verify(
    text: str,
    gold: str,
    *,
    anchors: bool = True,
    answer_type: str | None = None,
    choices: str = LETTERS,
    multi: bool = False,
    rel_tol: float = 0.0,
    decimals: bool = False,
) -> Verdict:
    r"""Judges the last answer of one assistant message: exactly, in this thread, within milliseconds.

    Args:
        text: Only the final message: no tool output, no earlier turns.
        gold: The right answer, with or without dollar signs or a box around it.
        anchors: Whether "The answer is ..." counts where there is no box; training should say no.
        answer_type: "choice" for the letter of a multiple choice.
        choices: The letters that there are.
        multi: Whether several letters are asked for.
        rel_tol: How far a number may be from the gold one, as a share of it.
        decimals: Whether a number is right that is the gold one when rounded to its decimals.

    >>> verify(r"so \boxed{\frac{1}{2}}", "0.5").correct
    True
    """
    return judge_text(text, gold, Options(anchors, answer_type, choices, multi, rel_tol, decimals))[0]


def judge_text(
    text: str, gold: str, options: Options, compare: type[Comparison] = Comparison
) -> tuple[Verdict, str | None]:
    """The verdict, and the whole answer that was found."""
    started = time.perf_counter()
    answer: str | None = None
    try:
        wanted = read_gold(gold)
    except (NoAnswer, Rejected):
        correct, reason, path = False, "gold_invalid", "none"
    else:
        try:
            answer = extract(text, anchors=options.anchors)
            correct, reason, path = judge(normal_form(answer), wanted, options, compare)
        except NoAnswer as problem:
            correct, reason, path = False, f"no_answer:{problem}", "extraction"
        except Rejected as problem:
            correct, reason, path = False, f"rejected:{problem}", "caps"
    shown = None if answer is None else answer[:_SHOWN]
    return Verdict(correct, reason, shown, path, 1000 * (time.perf_counter() - started)), answer


@dataclass(frozen=True, slots=True)
class Gold:
    normal: str
    value: Value | None
    """None where it is not read: then only its own text is equal to it."""


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Gold:
    """A gold answer, read once. Raises NoAnswer or Rejected where no answer could ever be equal to it."""
    return normal_gold(normal_form(_bare(gold).strip()))


def _bare(gold: str) -> str:
    """Without the box around it, or the solution in front of it."""
    boxes = find_boxes(gold[:WINDOW])
    if boxes:
        return last_boxes(gold, boxes)
    return gold.rpartition("####")[2]


@lru_cache(maxsize=4096)
def normal_gold(normal: str) -> Gold:
    """A gold answer in its normal form, read once. Raises NoAnswer."""
    if not normal:
        raise NoAnswer("gold")
    try:
        value = read(normal)
    except (Unread, Rejected):
        return Gold(normal, None)
    if _undefined(value):
        raise NoAnswer("gold")
    return Gold(normal, value)


@lru_cache(maxsize=1 << 16)
def gold_problem(gold: str, options: Options) -> str | None:
    r"""What is wrong with a gold answer that is not equal to itself, as a model would have to write it; else None.

    >>> gold_problem(r"\frac{1}{2", Options())
    'is not equal to itself: no_answer:unclosed_box'
    """
    try:
        verdict = judge_text(rf"\boxed{{{_bare(gold).strip()}}}", gold, options)[0]
    except NoAnswer as problem:
        return f"is not equal to itself: no_answer:{problem}"
    if verdict.reason == "gold_invalid":
        return "cannot be an answer: it has no value, is too long, or names no choice"
    return None if verdict.correct else f"is not equal to itself: {verdict.reason}"


def _undefined(value: Value) -> bool:
    if isinstance(value, Assignment):
        return _undefined(value.value)
    if isinstance(value, Ordered | Unordered):
        return any(map(_undefined, value.items))
    if not isinstance(value, Scalar) or variables(value.node):
        return False
    try:
        settled(value.node, {}, Fraction(7))
    except Undefined:
        return True
    except (Undecided, Rejected):
        return False
    return False


_WHOLE = re.compile(r"-?\d+")


def judge(answer: str, gold: Gold, options: Options, compare: type[Comparison] = Comparison) -> tuple[bool, str, str]:
    """(correct, reason, path) of a normal form. Raises Rejected where a value is too large to be worked out."""
    if not answer:
        return False, "no_answer:empty", "extraction"
    if options.answer_type == "choice":
        return _judge_choice(answer, gold.normal, options)
    if same_text(answer, gold.normal):
        return True, "equal:text", "text"
    if not (options.rel_tol or options.decimals) and _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(gold.normal):
        same = int(answer) == int(gold.normal)
        return same, "equal:num" if same else "different:num", "fraction"
    if gold.value is None:
        return False, "undecided", "none"
    comparison = compare(_fraction(options.rel_tol), decimals=options.decimals)
    try:
        same, kind = comparison.same(read(answer), gold.value)
    except (Unread, Undecided):
        return False, "undecided", "none"
    except Undefined:
        return False, "different:undefined", "parser"
    return same, f"{'equal' if same else 'different'}:{kind}", comparison.path


def _judge_choice(answer: str, gold: str, options: Options) -> tuple[bool, str, str]:
    given = chosen(answer, options.choices, options.multi)
    wanted = chosen(gold, options.choices, options.multi)
    if wanted is None:
        return False, "gold_invalid", "none"
    same = given == wanted
    return same, "equal:choice" if same else "different:choice", "text"


def _fraction(tolerance: float) -> Fraction:
    return Fraction(str(tolerance))
