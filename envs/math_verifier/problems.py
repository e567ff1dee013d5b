"""Arithmetic that is hard in the head, and conversations about it for a cold start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo_agent.messages import Message, assistant, call, tool_result, user

TIMED_OUT = "Error: timed out"
_NUM_TASKS = {"train": 100_000, "test": 10_000}
_COPYING = 0.25
"""Share of a cold start that only teaches to copy numbers; without it copying a tool's result never begins."""
_USES_TOOL, _TRIES_AGAIN = 0.36, 0.5
_MOST_CALLS = 3


@dataclass(frozen=True, slots=True)
class Template:
    """A question about three numbers, the expression that solves it, and its value."""

    question: str
    expression: str

    def value(self, a: int, b: int, c: int) -> int:
        return {
            "{a} * {b} + {c}": a * b + c,
            "{a} * {b} - {c}": a * b - c,
            "{a} + {b} * {c}": a + b * c,
            "{b} * {c} - {a}": b * c - a,
            "({a} + {b}) * {c}": (a + b) * c,
        }[self.expression]


TEMPLATES = (
    Template("What is {a} times {b} plus {c}?", "{a} * {b} + {c}"),
    Template("Multiply {a} by {b}, then subtract {c}.", "{a} * {b} - {c}"),
    Template("Add {a} to the product of {b} and {c}.", "{a} + {b} * {c}"),
    Template("A hall has {a} rows of {b} seats and {c} are taken. How many are free?", "{a} * {b} - {c}"),
    Template("What do you get when you take {a} away from {b} times {c}?", "{b} * {c} - {a}"),
    Template("A ticket costs {a} and a meal {b}. What do {c} of each cost?", "({a} + {b}) * {c}"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    expression: str
    answer: str


class Problems(Sequence[dict[str, Any]]):
    """The tasks of one split, made as they are asked for."""

    def __init__(self, split: str) -> None:
        if split not in _NUM_TASKS:
            raise ValueError(f"no split {split!r}; there is {' and '.join(_NUM_TASKS)}")
        self.split = split

    def __len__(self) -> int:
        return _NUM_TASKS[self.split]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        problem = draw(self.split, random.Random(f"math_verifier/{self.split}/{index % len(self)}"))
        return {"problem": problem.question, "gold": problem.answer}


def draw(split: str, rng: random.Random) -> Problem:
    while True:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        if held_out(a, b, c) == (split == "test"):
            break
    template = rng.choice(TEMPLATES)
    numbers = {"a": a, "b": b, "c": c}
    return Problem(
        template.question.format(**numbers), template.expression.format(**numbers), str(template.value(**numbers))
    )


def held_out(a: int, b: int, c: int) -> bool:
    """Whether three numbers, in whatever order, belong to the test split: one in ten."""
    return (a + b + c) % 10 == 0


def demonstration(rng: random.Random, progress: float, *, tool: bool, flaky: float) -> list[Message]:
    """One conversation, without its system message.

    The first quarter copies: numbers that are only repeated, and tool results, here arbitrary numbers, that are passed
    on, after none to two time-outs. The rest are right answers: 36 in 100 by the tool, the others in the head, which
    a small model cannot learn to do; after a time-out half call again and half answer in the head. All are in the
    final format. What is left to discover is which of these habits works: call the tool, and call it again.
    """
    if progress < _COPYING:
        return _copying(rng) if not tool or rng.random() < 0.5 else _passing_on(rng)
    problem = draw("train", rng)
    messages = [user(problem.question)]
    use_tool = tool and rng.random() < _USES_TOOL
    for _ in range(_MOST_CALLS):
        if not use_tool:
            break
        failed = rng.random() < flaky
        messages += _calling(problem, None if failed else problem.answer)
        use_tool = failed and rng.random() < _TRIES_AGAIN
    return [*messages, _answer(problem.answer)]


def _copying(rng: random.Random) -> list[Message]:
    numbers = " ".join(_number(rng) for _ in range(rng.randint(1, 6)))
    return [user(numbers), assistant(numbers)]


def _passing_on(rng: random.Random) -> list[Message]:
    problem, result = draw("train", rng), _number(rng)
    messages = [user(problem.question)]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        messages += _calling(problem, None)
    return [*messages, *_calling(problem, result), _answer(result)]


def _number(rng: random.Random) -> str:
    digits = rng.choice((2, 3, 3, 3, 4, 4, 5, 5))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _calling(problem: Problem, result: str | None) -> list[Message]:
    """A call and what came back; None: a time-out."""
    return [
        assistant("", [call("python", code=problem.expression)]),
        tool_result(
            TIMED_OUT if result is None else result, name="python", outcome="error" if result is None else "ok"
        ),
    ]


def _answer(value: str) -> Message:
    return assistant(rf"\boxed{{{value}}}")
