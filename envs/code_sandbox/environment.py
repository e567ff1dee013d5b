"""CodeSandbox: write a program, run the visible tests, hand it in; hidden tests decide."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.code_sandbox.compositions import Compositions, compositions, demonstration
from envs.code_sandbox.feedback import explain, explain_file
from gspo_agent.env import ToolEnv, tool
from gspo_agent.env.contract import StepResult
from gspo_agent.errors import EnvError, ToolError, Unscored
from gspo_agent.messages import Message
from gspo_agent.sandbox import SandboxLimits
from rewards.unit_tests import Verdict, judge

_DEFAULT_TIME_LIMIT = 5.0


class CodeSandbox(ToolEnv):
    """A programming task with visible and hidden unit tests; the program runs in the sandbox only.

    A task is {"prompt", "kind": "stdio" | "call" | "testfile", "public_tests", "hidden_tests"} and may have a
    "time_limit", CPU seconds for each test. Tests are {"stdin", "stdout"}, or {"args", "expected"} of the function
    "entry_point" (of a new object of the class "cls"), or pytest files that import the program, as
    `rewards.unit_tests.judge` takes them. The score is 1 when the program that was written last passes every hidden
    test. No message, tool result or exception shows these, and only their inputs enter the program's sandbox. A
    message without a tool call hands the program in.
    """

    logs_calls = True

    def setup(self, task: dict[str, Any]) -> None:
        _check(task)
        self.visible = {key: value for key, value in task.items() if key != "hidden_tests"}
        self.code: str | None = None
        self.passing: bool | None = None
        """Of the program that was written last; None: its visible tests were not run."""
        self.test_runs = self.corrections = 0

    def prompt(self, task: dict[str, Any]) -> str:
        return str(task["prompt"])

    @tool
    def write(self, code: str) -> str:
        """Write the whole program."""
        self._replace(code)
        return "written"

    @tool
    def edit(self, old: str, new: str) -> str:
        """Replace a part of the program."""
        code = self._written()
        found = code.count(old) if old else 0
        if found != 1:
            raise ToolError(f"the old part is in the program {found} times; give one that is there once")
        self._replace(code.replace(old, new))
        return "edited"

    @tool(idempotent=True)
    async def test(self) -> str:
        """Run the visible tests."""
        code, tests = self._written(), self.visible["public_tests"]
        verdict = await _judge(code, self.visible, tests)
        self.test_runs += 1
        self.passing = verdict.verdict == "pass"
        if self.passing:
            return "passed"
        failed = len(verdict.tests) - 1
        if self.visible["kind"] == "testfile":
            return explain_file(next(test for test in verdict.tests if test.verdict != "pass"))
        return explain(self.visible, tests[failed], verdict.tests[failed])

    async def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        if self.code is None:
            return {"passed": 0.0}
        verdict = await _judge(self.code, task, task["hidden_tests"])
        return {"passed": float(verdict.verdict == "pass")}

    async def astep(self, action: Message) -> StepResult:
        messages, reward, terminated, truncated, info = await super().astep(action)
        return messages, reward, terminated, truncated, self._with_metrics(info) if terminated else info

    async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        reward, info = await super().afinish(stop_reason)
        return reward, self._with_metrics(info)

    def _written(self) -> str:
        if self.code is None:
            raise ToolError("nothing is written yet; call write first")
        return self.code

    def _replace(self, code: str) -> None:
        self.corrections += self.passing is False
        self.code, self.passing = code, None

    def _with_metrics(self, info: dict[str, Any]) -> dict[str, Any]:
        metrics = {
            "tested": float(self.test_runs > 0),
            "tested_before_finish": float(self.passing is not None),
            "finished_on_passed": float(self.passing is True),
            "test_runs": float(self.test_runs),
            "corrections": float(self.corrections),
        }
        return {**info, "metrics": metrics}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Compositions:
        """Procedural ones, made as they are asked for; no composition of one split occurs in the other."""
        return Compositions(split)

    @classmethod
    def demonstration(
        cls, rng: random.Random, progress: float, **options: Any
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Training compositions, worked out with and without testing; see `compositions.demonstration`."""
        messages = demonstration(rng, progress, compositions("train"))
        return messages, [declared.schema for declared in (cls.write, cls.edit, cls.test)]


async def _judge(code: str, task: Mapping[str, Any], tests: Sequence[Mapping[str, Any]]) -> Verdict:
    """Stops at the first failure. Raises Unscored where tests or sandbox, not the code, are at fault."""
    cpu_s = float(task.get("time_limit") or _DEFAULT_TIME_LIMIT)
    verdict = await judge(
        code,
        tests,
        kind=task["kind"],
        entry_point=task.get("entry_point"),
        cls=task.get("cls"),
        limits=SandboxLimits(cpu_s=cpu_s, wall_s=3 * cpu_s + 5),
        stop_at_failure=True,
    )
    if not verdict.scored:
        raise Unscored(f"CodeSandbox: {verdict.verdict}: {verdict.reason}")
    return verdict


def _check(task: Mapping[str, Any]) -> None:
    """Raises EnvError that names the field; never its content, which may be hidden."""
    kind = task.get("kind")
    if kind not in ("stdio", "call", "testfile"):
        raise EnvError(f"CodeSandbox: a task's kind is 'stdio', 'call' or 'testfile', not {kind!r}")
    for field in ("prompt", "public_tests", "hidden_tests", *(("entry_point",) if kind == "call" else ())):
        if not task.get(field):
            raise EnvError(f"CodeSandbox: the task, of kind {kind!r}, has no {field!r}")
