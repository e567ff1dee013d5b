"""MathVerifier: a problem, an optional Python interpreter, an answer in a box that is verified."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envs.math_verifier.interpreter import Cell, Interpreter
from envs.math_verifier.problems import TIMED_OUT, Problems, demonstration
from gspo_agent.env import ToolEnv, tool
from gspo_agent.env.calls import call_turn
from gspo_agent.errors import EnvError, ToolError, Unscored
from gspo_agent.messages import Message, system, user
from gspo_agent.sandbox import SandboxLimits
from gspo_agent.tools import Tool
from rewards.math_answer import Options, Verdict, Workers, gold_problem, guessable, need_math_verify

INSTRUCTION = r"Solve the problem. Put the answer in \boxed{}."
AGAIN = r"That is not the answer. Try once more, and put the new answer in \boxed{}."
"""The whole feedback there ever is: it says nothing about how far off an answer was."""
_SECOND_TRY = 0.5


class MathVerifier(ToolEnv):
    r"""A mathematical problem. A task is {"problem", "gold"}, and may say how the answer is compared: "answer_type",
    "choices", "multi", "rel_tol", "decimals" (see `rewards.math_answer.verify`).

    The first message without a tool call is the submission; its `\boxed{}` is the answer, and only that counts. No
    verdict is shown, and none is reached before the episode is over. The gold answer enters neither the prompt nor the
    sandbox.

    Args:
        tool: Whether there is a Python interpreter, whose variables live as long as the episode.
        flaky: Chance that a call is reported as timed out, and not run.
        cpu_s: CPU seconds of one call.
        retries: 1 gives a second submission after a wrong one, for half of the reward. A task may say it for itself.
            Where a few guesses are enough (a choice, a word, a small number) there is none.
        second_opinion: Whether math-verify may confirm what the verifier leaves undecided.
    """

    shared: Workers

    def __init__(
        self,
        tool: bool = True,
        flaky: float = 0.0,
        cpu_s: float = 5.0,
        retries: int = 0,
        second_opinion: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= flaky < 1:
            raise ValueError(f"flaky={flaky} is not a probability below 1")
        if retries not in (0, 1):
            raise ValueError(f"retries={retries}; there is at most 1")
        if second_opinion:
            need_math_verify()
        self.tool, self.flaky, self.retries, self.second_opinion = tool, flaky, retries, second_opinion
        self.may_retry = self.retried = False
        self._interpreter = Interpreter(SandboxLimits(cpu_s=cpu_s, wall_s=3 * cpu_s + 5))

    @classmethod
    def open_shared(cls, **_: Any) -> Workers:
        return Workers()

    @classmethod
    def close_shared(cls, shared: Workers) -> None:
        shared.close()

    @classmethod
    def check_task(cls, task: Mapping[str, Any], **_: Any) -> None:
        for field in ("problem", "gold"):
            if not str(task.get(field) or "").strip():
                raise ValueError(f"no {field!r}")
        if task.get("retries", 0) not in (0, 1):
            raise ValueError(f"retries is {task['retries']!r}; write 0 or 1")
        if problem := gold_problem(str(task["gold"]), _options(task)):
            raise ValueError(f"the gold answer {problem}")

    def setup(self, task: dict[str, Any]) -> None:
        try:
            self.check_task(task)
        except ValueError as problem:
            raise EnvError(f"MathVerifier: the task cannot be used: {problem}") from None
        wanted = bool(task.get("retries", self.retries))
        self.may_retry = wanted and not guessable(str(task["gold"]), _options(task))
        self.retried = False
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

    async def reply(self, task: dict[str, Any], answer: str) -> str | None:
        if not self.may_retry or (await self._verdict(task, answer)).correct:
            return None
        self.may_retry, self.retried = False, True
        return AGAIN

    async def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        verdict = await self._verdict(task, answer)
        self.metrics[f"count/verdict/{verdict.reason}"] = 1.0
        return {"right": float(verdict.correct) * (_SECOND_TRY if self.retried else 1.0)}

    async def _verdict(self, task: Mapping[str, Any], answer: str) -> Verdict:
        options = replace(_options(task), second_opinion=self.second_opinion)
        verdict = await self.shared.verify(answer, str(task["gold"]), options)
        if not verdict.scored:
            raise Unscored(f"MathVerifier: no verdict: {verdict.reason}")
        return verdict

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


def _options(task: Mapping[str, Any]) -> Options:
    """Only a box counts, whatever the task says."""
    return replace(Options.of(task), anchors=False)
