"""Calculator: a sum that is hard in the head, and a calculator that may fail. The environment to read first."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import ToolError
from gspo_agent.messages import Message, assistant, call, tool_result, user

_TEMPLATES = (
    "{a} * {b} + {c}",
    "{a} + {b} * {c}",
    "{a} * {b} - {c}",
    "({a} + {b}) * {c}",
    "{a} + {b} + {c}",
    "{a} - {b} + {c}",
)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_NUM_TASKS = {"train": 100_000, "test": 10_000}
_TIMEOUT = "the calculator timed out"
_ECHO_SHARE = 1 / 3
"""Of a cold start: copying numbers has to begin before a tool's result can be passed on."""


class Calculator(ToolEnv):
    """Questions with three numbers; `flaky` is the chance that a call of the calculator times out."""

    def __init__(self, flaky: float = 0.0) -> None:
        super().__init__()
        if not 0 <= flaky < 1:
            raise ValueError(f"flaky={flaky} is not a probability below 1")
        self.flaky = flaky

    def prompt(self, task: dict[str, Any]) -> str:
        return f"What is {task['expression']}?"

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an expression of whole numbers with + - * and parentheses."""
        if self.np_random.random() < self.flaky:
            raise ToolError(_TIMEOUT)
        return str(evaluate(expression))

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        numbers = re.findall(r"-?\d+", answer)
        return {"right": float(bool(numbers) and int(numbers[-1][:20]) == evaluate(task["expression"]))}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Sequence[dict[str, Any]]:
        """Made as they are asked for; no three numbers of one split occur in the other."""
        return _Tasks(split)

    @classmethod
    def demonstration(
        cls, rng: random.Random, progress: float, *, flaky: float = 0.0, **options: Any
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Right answers only: half in the head, half with the calculator; after a timeout half try again.

        What is left to discover: which of the two a small model can do, and that trying again pays.
        """
        schemas = [cls.calculate.schema]
        expression = _expression("train", rng)
        if progress < _ECHO_SHARE:
            numbers = " ".join(str(rng.randint(11, 99999)) for _ in range(3))
            return [user(numbers), assistant(numbers)], schemas
        messages = [user(f"What is {expression}?")]
        use_tool = rng.random() < 0.5
        while use_tool:
            failed = rng.random() < flaky
            result = _TIMEOUT if failed else str(evaluate(expression))
            messages.append(assistant("", [call("calculate", expression=expression)]))
            messages.append(tool_result(result, name="calculate", outcome="error" if failed else "ok"))
            use_tool = failed and rng.random() < 0.5
        messages.append(assistant(str(evaluate(expression))))
        return messages, schemas


def evaluate(expression: str) -> int:
    """The value of a sum of whole numbers. Raises ToolError for anything else: nothing of it is run as Python."""
    if len(expression) > 200:
        raise ToolError("the expression is longer than 200 characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, ValueError, MemoryError):
        raise ToolError(f"cannot read {expression!r}; write numbers, + - * and parentheses") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


class _Tasks(Sequence[dict[str, Any]]):
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
        rng = random.Random(f"calculator/{self.split}/{index % len(self)}")
        return {"expression": _expression(self.split, rng)}


def _expression(split: str, rng: random.Random) -> str:
    while True:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        held_out = (a * 1147 + b * 37 + c) % 10 == 0
        if held_out == (split == "test"):
            return rng.choice(_TEMPLATES).format(a=a, b=b, c=c)
