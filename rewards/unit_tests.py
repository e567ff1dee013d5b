"""Code against unit tests: the judge stays outside, the code gets inputs only, and its answer is a claim.

What the code prints or returns is compared here, as plain data, with what the tests expect. Exit codes, words on
standard output and files decide nothing. Nothing is run without isolation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gspo_agent.errors import ConfigError
from gspo_agent.sandbox import CallResult, RunResult, Sandbox, SandboxLimits, readable, shared_sandbox
from gspo_agent.sandbox.inside import data
from rewards import test_files
from rewards.comparison import differing_token, same_lines, same_value
from rewards.verdict import Class, TestVerdict, Verdict, explain, summary

__all__ = ["Checker", "Class", "Compare", "TestVerdict", "Verdict", "judge"]

Compare = Literal["tokens", "exact_tokens", "lines", "values", "unordered"]
Checker = Callable[[Mapping[str, Any], Any], bool]
"""Trusted code: (the test, the output as text or the returned plain data) -> whether it is right."""

_COMPARISONS: dict[str, tuple[Compare, ...]] = {
    "stdio": ("tokens", "exact_tokens", "lines"),
    "call": ("values", "unordered"),
}
_FIELDS = {"stdio": ("stdin", "stdout"), "call": ("args", "expected")}


async def judge(
    code: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    kind: Literal["stdio", "call", "testfile"] = "stdio",
    entry_point: str | None = None,
    cls: str | None = None,
    checker: Checker | None = None,
    compare: Compare | None = None,
    limits: SandboxLimits | None = None,
    sandbox: Sandbox | None = None,
    stop_at_failure: bool = False,
    deadline_s: float | None = None,
) -> Verdict:
    """Runs every test, each under `limits`, and compares.

    Args:
        tests: for "stdio" {"stdin", "stdout"}; for "call" {"args", "expected"}, plain data in which the tags of
            `gspo_agent.sandbox.inside.data` stand for what JSON lacks; for "testfile" {"test_file"}, the source of a
            pytest or unittest file, and maybe "module", the name by which it imports the code ("solution"), and
            "count", how many of its tests a right solution passes.
        entry_point: the function that "call" calls; with `cls`, a method of a new object of that class each time.
        checker: decides instead of the comparison, for tasks with several right answers.
        compare: "tokens" (default of "stdio": decimal numbers within 1e-6), "exact_tokens", "lines" (tokens, and line
            breaks in the same places); "values" (default of "call"), "unordered" (the outermost collection).
        sandbox: None: the process's shared one.
        deadline_s: for all tests (of one file) together, on the clock from the first one's turn; what it leaves out
            has passed its time limit.
    """
    started = time.monotonic()
    if kind == "testfile":
        return await test_files.judge(
            code, tests, limits=limits or SandboxLimits(), sandbox=sandbox or shared_sandbox(),
            stop_at_failure=stop_at_failure, deadline_s=deadline_s,
        )  # fmt: skip
    compare = _comparison(kind, compare)
    problem = _task_problem(tests, kind, entry_point)
    if problem:
        return Verdict("task_error", 0, len(tests), problem, [], 0.0)
    sandbox = sandbox or shared_sandbox()
    limits = limits or SandboxLimits()
    verdicts: list[TestVerdict] = []

    def stop(result: RunResult | CallResult) -> bool:
        verdicts.append(_judge_one(tests[len(verdicts)], result, compare, checker))
        return stop_at_failure and verdicts[-1].verdict != "pass"

    if kind == "stdio":
        results: Sequence[RunResult | CallResult]
        stdins = [test["stdin"] for test in tests]
        results = await sandbox.run_many(code, stdins, limits=limits, stop=stop, deadline_s=deadline_s)
    else:
        arguments = [data.decode(test["args"]) for test in tests]
        results = await sandbox.call_many(
            code, entry_point or "", arguments, cls=cls, limits=limits, stop=stop, deadline_s=deadline_s
        )
    for lost in results[len(verdicts) :]:  # what never came back was not shown to `stop`
        stop(lost)
    if not (stop_at_failure and verdicts and verdicts[-1].verdict != "pass"):
        late = TestVerdict("time_limit", "time limit of all tests together", "", "", 0.0)
        verdicts += [late] * (len(tests) - len(verdicts))
    return summary(verdicts, len(tests), 1000 * (time.monotonic() - started))


def _comparison(kind: str, compare: Compare | None) -> Compare:
    if not isinstance(kind, str) or kind not in _COMPARISONS:
        raise ConfigError(f"unknown kind of test {kind!r}; known are {', '.join(_COMPARISONS)}, testfile")
    known = _COMPARISONS[kind]
    if compare is not None and compare not in known:
        raise ConfigError(f"comparison {compare!r} is not for tests of kind {kind!r}; known are {', '.join(known)}")
    return compare or known[0]


def _task_problem(tests: Sequence[Mapping[str, Any]], kind: str, entry_point: str | None) -> str | None:
    """Why these tests cannot judge anything; an empty list must never be a pass."""
    if not tests:
        return "the task has no tests"
    if kind == "call" and not entry_point:
        return "the task names no function to call"
    for number, test in enumerate(tests, 1):
        missing = [field for field in _FIELDS[kind] if field not in test]
        if missing:
            return f"test {number} has no {missing[0]!r}"
        try:
            if kind == "stdio":
                ok = all(isinstance(test[field], str | bytes) for field in _FIELDS[kind])
                for text in (test[field] for field in _FIELDS[kind] if isinstance(test[field], str)):
                    text.encode()  # half of a surrogate pair has no bytes
            else:
                ok = isinstance(data.decode(test["args"]), list | tuple)
                data.decode(test["expected"])
        except ValueError as error:
            return f"test {number}: {error}"
        if not ok:
            return f"test {number}: {'stdin and stdout must be text' if kind == 'stdio' else 'args must be a list'}"
    return None


def _judge_one(
    test: Mapping[str, Any], result: RunResult | CallResult, compare: Compare, checker: Checker | None
) -> TestVerdict:
    verdict: Class
    reason = ""
    if result.status == "ok":
        verdict, reason = _compare(test, result, compare, checker)
    else:
        verdict = "runtime_error" if result.status == "dead" else result.status
    if isinstance(result, RunResult):
        output, error = readable(result.stdout), readable(result.stderr)
    else:
        output, error = _shown(result.value), readable(result.error.encode("utf-8", "backslashreplace"))
    reason = reason or explain(verdict, error)
    return TestVerdict(verdict, reason, output, error, 1000 * result.wall_s)


def _compare(
    test: Mapping[str, Any], result: RunResult | CallResult, compare: Compare, checker: Checker | None
) -> tuple[Class, str]:
    answer = result.stdout.decode("utf-8", "replace") if isinstance(result, RunResult) else result.value
    if checker:
        try:
            return ("pass" if checker(test, answer) else "wrong_answer"), ""
        except Exception as error:
            return "task_error", f"the task's checker raised {type(error).__name__}"
    if isinstance(result, CallResult):
        right = same_value(result.value, data.decode(test["expected"]), unordered=compare == "unordered")
        return ("pass" if right else "wrong_answer"), ""
    expected = test["stdout"].encode() if isinstance(test["stdout"], str) else test["stdout"]
    position = differing_token(result.stdout, expected, tolerant=compare != "exact_tokens")
    if position is not None:
        return "wrong_answer", f"wrong answer: the output differs at token {position}"
    if compare == "lines" and not same_lines(result.stdout, expected):
        return "wrong_answer", "wrong answer: the line breaks differ"
    return "pass", ""


def _shown(value: Any) -> str:
    # Numbers of any size are shown in hexadecimal rather than refused.
    try:
        return readable(repr(value).encode("utf-8", "backslashreplace"))
    except ValueError:
        return readable(data.dumps(value))
