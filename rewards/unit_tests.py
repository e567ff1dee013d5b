"""Code against unit tests: the judge stays outside, the code gets inputs only, and its answer is a claim.

What the code prints or returns is compared here, as plain data, with what the tests expect. Exit codes, words on
standard output and files decide nothing. Nothing is run without isolation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo_agent.errors import ConfigError
from gspo_agent.sandbox import CallResult, RunResult, Sandbox, SandboxLimits, readable, shared_sandbox
from gspo_agent.sandbox.inside import data
from rewards.comparison import differing_token, same_lines, same_value

Class = Literal[
    "pass",
    "wrong_answer",
    "runtime_error",
    "compile_error",
    "time_limit",
    "memory_limit",
    "output_limit",
    "task_error",  # the tests themselves cannot be used
    "infra_error",  # the sandbox failed
]
Compare = Literal["tokens", "exact_tokens", "lines", "values", "unordered"]
Checker = Callable[[Mapping[str, Any], Any], bool]
"""Trusted code: (the test, the output as text or the returned plain data) -> whether it is right."""

_COMPARISONS: dict[str, tuple[Compare, ...]] = {
    "stdio": ("tokens", "exact_tokens", "lines"),
    "call": ("values", "unordered"),
}
_FIELDS = {"stdio": ("stdin", "stdout"), "call": ("args", "expected")}
_EXCEPTION = re.compile(r"^(?:\w+\.)*([A-Za-z_]\w*)(?::|$)")


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """One test. `output` and `error` are for tests that the model may see."""

    __test__ = False  # not for pytest to collect

    verdict: Class
    reason: str
    """One line without inputs and expected outputs."""
    output: str
    """What the code printed or returned, shortened."""
    error: str
    """Its traceback or standard error, shortened."""
    ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """All tests of one solution: "pass" when every test passed, else the class of the first that did not."""

    verdict: Class
    passed: int
    total: int
    reason: str
    """One line that is safe to show to the model."""
    tests: list[TestVerdict]
    """In order; shorter than `total` when the judge stopped at a failure."""
    ms: float

    @property
    def scored(self) -> bool:
        """False when the code was not judged (task_error, infra_error): never to be read as reward 0."""
        return self.verdict not in ("task_error", "infra_error")

    @property
    def fraction(self) -> float:
        """The share of tests that passed."""
        return self.passed / self.total if self.total else 0.0


async def judge(
    code: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    kind: Literal["stdio", "call"] = "stdio",
    entry_point: str | None = None,
    cls: str | None = None,
    checker: Checker | None = None,
    compare: Compare | None = None,
    limits: SandboxLimits | None = None,
    sandbox: Sandbox | None = None,
    stop_at_failure: bool = False,
) -> Verdict:
    """Runs every test, each under `limits`, and compares.

    Args:
        tests: for "stdio" {"stdin", "stdout"}; for "call" {"args", "expected"}, plain data in which the tags of
            `gspo_agent.sandbox.inside.data` stand for what JSON lacks.
        entry_point: the function that "call" calls; with `cls`, a method of a new object of that class each time.
        checker: decides instead of the comparison, for tasks with several right answers.
        compare: "tokens" (default of "stdio": decimal numbers within 1e-6), "exact_tokens", "lines" (tokens, and line
            breaks in the same places); "values" (default of "call"), "unordered" (the outermost collection).
        sandbox: None: the process's shared one.
    """
    started = time.monotonic()
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
        results = await sandbox.run_many(code, [test["stdin"] for test in tests], limits=limits, stop=stop)
    else:
        arguments = [data.decode(test["args"]) for test in tests]
        results = await sandbox.call_many(code, entry_point or "", arguments, cls=cls, limits=limits, stop=stop)
    for lost in results[len(verdicts) :]:  # what never came back was not shown to `stop`
        stop(lost)
    return _summary(verdicts, len(tests), 1000 * (time.monotonic() - started))


def _comparison(kind: str, compare: Compare | None) -> Compare:
    if kind not in _COMPARISONS:
        raise ConfigError(f"unknown kind of test {kind!r}; known are {', '.join(_COMPARISONS)}")
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
        output, error = _shown(result.value), readable(result.error.encode())
    reason = reason or _explain(verdict, error)
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


def _explain(verdict: Class, error: str) -> str:
    """The class in words; of an exception only the type, because its message may carry a hidden input."""
    words = verdict.replace("_", " ")
    if verdict in ("runtime_error", "compile_error"):
        lines = error.strip().splitlines()
        name = _EXCEPTION.match(lines[-1]) if lines else None
        return f"{words} ({name[1][:60]})" if name else words
    return words


def _summary(tests: list[TestVerdict], total: int, ms: float) -> Verdict:
    passed = sum(test.verdict == "pass" for test in tests)
    failures = [(number, test) for number, test in enumerate(tests, 1) if test.verdict != "pass"]
    if passed == total:
        return Verdict("pass", passed, total, f"all {total} tests passed", tests, ms)
    # What was not judged outweighs what was: the share of tests that passed is not known then.
    unscored = [(number, test) for number, test in failures if test.verdict in ("infra_error", "task_error")]
    number, first = (unscored or failures)[0]
    reason = f"{passed} of {total} tests passed; test {number}: {first.reason}"
    return Verdict(first.verdict, passed, total, reason, tests, ms)
