"""MathVerifier: a problem, an optional Python interpreter, an answer in a box that is verified."""

from __future__ import annotations

import random
from typing import Any

from envs.math_verifier.interpreter import Cell, Interpreter
from envs.math_verifier.problems import TIMED_OUT, Problems, demonstration
from gspo_agent.env import ToolEnv, tool
from gspo_agent.env.calls import call_turn
from gspo_agent.errors import EnvError, ToolError, Unscored
from gspo_agent.messages import Message, system, user
from gspo_agent.sandbox import SandboxLimits
from gspo_agent.tools import Tool
from rewards.math_answer import usable, verify

INSTRUCTION = r"Solve the problem. Put the answer in \boxed{}."


class MathVerifier(ToolEnv):
    r"""A mathematical problem. A task is {"problem", "gold"}.

    The first message without a tool call is the submission; its `\boxed{}` is the answer, and only that counts. There
    is one submission, and no verdict is shown. The gold answer enters neither the prompt nor the sandbox.

    Args:
        tool: Whether there is a Python interpreter, whose variables live as long as the episode.
        flaky: Chance that a call is reported as timed out, and not run.
        cpu_s: CPU seconds of one call.
    """

    def __init__(self, tool: bool = True, flaky: float = 0.0, cpu_s: float = 5.0) -> None:
        super().__init__()
        if not 0 <= flaky < 1:
            raise ValueError(f"flaky={flaky} is not a probability below 1")
        self.tool, self.flaky = tool, flaky
        self._interpreter = Interpreter(SandboxLimits(cpu_s=cpu_s, wall_s=3 * cpu_s + 5))

    def setup(self, task: dict[str, Any]) -> None:
        for field in ("problem", "gold"):
            if not str(task.get(field) or "").strip():
                raise EnvError(f"MathVerifier: the task has no {field!r}")
        if not usable(str(task["gold"])):
            raise EnvError("MathVerifier: the gold answer of this task cannot be read")
        self.cells: tuple[Cell, ...] = ()

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [system(INSTRUCTION), user(str(task["problem"]))]

    def tools(self) -> list[Tool]:
        return list(self._declared.values()) if self.tool else []

    # Nothing outside the session is ever changed, so a call that a crash cut off may run again.
    @tool(idempotent=True)
    async def python(self, code: str) -> str:
        """Run Python code; shows what it prints and the last value."""
        if self.np_random.random() < self.flaky:
            raise ToolError(TIMED_OUT)
        result, self.cells = await self._interpreter.cell(call_turn(), code, self.cells)
        shown = result.output.removesuffix("\n")
        if result.status != "ok":
            raise ToolError(shown)
        return shown

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        verdict = verify(answer, str(task["gold"]), anchors=False)
        if not verdict.scored:
            raise Unscored("MathVerifier: the gold answer of this task cannot be read")
        return {"right": float(verdict.correct)}

    async def close(self) -> None:  # type: ignore[override]
        await self._interpreter.close()

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Problems:
        """Arithmetic word problems, made as they are asked for; no three numbers of one split occur in the other."""
        return Problems(split)

    @classmethod
    def demonstration(
        cls, rng: random.Random, progress: float, *, tool: bool = True, flaky: float = 0.0, **options: Any
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Copying first, then right answers with and without the tool; see `problems.demonstration`."""
        messages = demonstration(rng, progress, tool=tool, flaky=flaky)
        return [system(INSTRUCTION), *messages], [cls.python.schema] if tool else []
