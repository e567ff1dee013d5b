"""Procedural tasks for the coding agent: short list programs whose instructions can be read in more than one way.

"sort, append an extreme" does not say which way to sort or which extreme; each task means one reading, drawn at
random, and only its tests know which. Guessing blindly passes about two times in five, so it pays to run the visible
tests, and to edit the program, to another reading, when they fail.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from envs.code_sandbox.feedback import wrong_answer
from gspo_agent.messages import Message, assistant, call, tool_result, user

ENTRY_POINT = "f"
_OPERATIONS_IN_A_PROGRAM = 3
_NUM_TASKS = {"train": 100_000, "test": 10_000}
_HELD_OUT = 1 / 5
"""Share of the compositions (operations in their order) that only the test split has."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction and the Python expressions, in `x`, that it may mean."""

    phrase: str
    readings: tuple[str, ...]


OPERATIONS = (
    Operation("reverse", ("list(reversed(x))",)),
    Operation("double each", ("[v + v for v in x]",)),
    Operation("square each", ("[v * v for v in x]",)),
    Operation("negate each", ("[-v for v in x]",)),
    Operation("repeat the list", ("x + x",)),
    Operation("append the sum", ("x + [sum(x)]",)),
    Operation("add the length to each", ("[v + len(x) for v in x]",)),
    Operation("sort", ("sorted(x)", "sorted(x, reverse=True)")),
    Operation("append an extreme", ("x + [max(x)]", "x + [min(x)]")),
    Operation("subtract an extreme", ("[v - max(x) for v in x]", "[v - min(x) for v in x]")),
    Operation("drop an extreme", ("[v for v in x if v < max(x)]", "[v for v in x if v > min(x)]")),
    Operation("put the length at an end", ("[len(x)] + x", "x + [len(x)]")),
    Operation("drop an end", ("x[1:]", "x[:-1]")),
)
_MOST_AMBIGUOUS = 2

_FIRST = 0.6
_SHARES_FIRST = {"blind": 0.1, "tested": 0.1, "corrected": 0.7, "corrected unchecked": 0.1}
_SHARES_THEN = {"blind": 0.6, "tested": 0.15, "corrected": 0.18, "corrected unchecked": 0.07}
"""Of the demonstrations, before and after the part _FIRST of a cold start."""

# These expressions are constants of this file; what a model writes never comes here.
_FUNCTIONS: dict[str, Callable[[list[int]], list[int]]] = {
    reading: eval(f"lambda x: {reading}") for operation in OPERATIONS for reading in operation.readings
}


def program(readings: Sequence[str]) -> str:
    """The function that applies `readings` one after another."""
    lines = "".join(f"    x = {reading}\n" for reading in readings)
    return f"def {ENTRY_POINT}(x):\n{lines}    return x\n"


@cache
def compositions(split: str) -> tuple[tuple[Operation, ...], ...]:
    """Three different operations in order, one or two of them ambiguous; the splits share none."""
    if split not in _NUM_TASKS:
        raise ValueError(f"no split {split!r}; there is {' and '.join(_NUM_TASKS)}")
    found = [
        operations
        for operations in itertools.permutations(OPERATIONS, _OPERATIONS_IN_A_PROGRAM)
        if 1 <= sum(len(operation.readings) > 1 for operation in operations) <= _MOST_AMBIGUOUS
    ]
    random.Random(0).shuffle(found)
    num_test = round(_HELD_OUT * len(found))
    return tuple(found[:num_test] if split == "test" else found[num_test:])


class Compositions(Sequence[dict[str, Any]]):
    """The tasks of a split, made as they are asked for; the same position always holds the same task."""

    def __init__(self, split: str) -> None:
        self.split, self._compositions = split, compositions(split)

    def __len__(self) -> int:
        return _NUM_TASKS[self.split]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        rng = random.Random(f"compositions/{self.split}/{index % len(self)}")
        return draw(rng, self._compositions).task()


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A composition, the readings that are meant, and inputs that tell every other choice of readings apart."""

    operations: tuple[Operation, ...]
    meant: tuple[str, ...]
    public: tuple[list[int], ...]
    hidden: tuple[list[int], ...]

    @property
    def prompt(self) -> str:
        return f"Write f(x): {', '.join(operation.phrase for operation in self.operations)}."

    @property
    def others(self) -> list[tuple[str, ...]]:
        """Every choice of readings but the one that is meant."""
        return [readings for readings in _choices(self.operations) if readings != self.meant]

    def task(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "kind": "call",
            "entry_point": ENTRY_POINT,
            "public_tests": self._tests(self.public),
            "hidden_tests": self._tests(self.hidden),
            "time_limit": 2.0,
        }

    def _tests(self, inputs: Sequence[list[int]]) -> list[dict[str, Any]]:
        return [{"args": [x], "expected": _result(self.meant, x)} for x in inputs]


def draw(rng: random.Random, among: Sequence[tuple[Operation, ...]]) -> Puzzle:
    """A puzzle whose first visible test fails for every wrong choice of readings."""
    while True:
        operations = rng.choice(among)
        choices = _choices(operations)
        meant = rng.choice(choices)
        public = tuple(_numbers(rng, 3, 4) for _ in range(2))
        hidden = tuple(_numbers(rng, 4, 7) for _ in range(6))
        wanted = [_result(meant, x) for x in public + hidden]
        shown = [_result(readings, public[0]) for readings in choices]
        if None not in wanted and None not in shown and shown.count(wanted[0]) == 1:
            return Puzzle(operations, meant, public, hidden)


def _choices(operations: Sequence[Operation]) -> list[tuple[str, ...]]:
    return list(itertools.product(*(operation.readings for operation in operations)))


def _numbers(rng: random.Random, fewest: int, most: int) -> list[int]:
    return [rng.randint(0, 9) for _ in range(rng.randint(fewest, most))]


def _result(readings: Sequence[str], x: list[int]) -> list[int] | None:
    """None where there is none: an empty list has no extreme."""
    try:
        for reading in readings:
            x = _FUNCTIONS[reading](x)
    except ValueError:
        return None
    return x


def demonstration(rng: random.Random, progress: float, among: Sequence[tuple[Operation, ...]]) -> list[Message]:
    """One conversation that ends with the right program, for a cold start.

    First mostly wrong readings, failed tests and edits, so that correcting is learned at all; then mostly blind luck.
    Every ending is right, but a model that imitates the lucky ones cannot know the reading. What is left to discover:
    that testing before finishing pays, and that a failed test is worth another try.
    """
    puzzle = draw(rng, among)
    shares = _SHARES_FIRST if progress < _FIRST else _SHARES_THEN
    kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
    corrected = kind in ("corrected", "corrected unchecked")
    readings = list(rng.choice(puzzle.others) if corrected else puzzle.meant)
    messages = [user(puzzle.prompt), *_call("write", "written", code=program(readings))]
    if kind != "blind":
        messages += _test(puzzle, readings)
    wrong = [i for i, meant in enumerate(puzzle.meant) if readings[i] != meant]
    for i in rng.sample(wrong, len(wrong)):
        messages += _call("edit", "edited", old=readings[i], new=puzzle.meant[i])
        readings[i] = puzzle.meant[i]
        if kind == "corrected" or tuple(readings) != puzzle.meant:
            messages += _test(puzzle, readings)
    return [*messages, assistant("Done.")]


def _test(puzzle: Puzzle, readings: Sequence[str]) -> list[Message]:
    task = puzzle.task()
    output = _result(readings, puzzle.public[0])
    if tuple(readings) == puzzle.meant:
        return _call("test", "passed")
    return _call("test", wrong_answer(task, task["public_tests"][0], repr(output)))


def _call(name: str, result: str, **arguments: str) -> list[Message]:
    return [assistant("", [call(name, **arguments)]), tool_result(result, name=name)]
