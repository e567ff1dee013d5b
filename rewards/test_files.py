"""Code against pytest and unittest files: the tests run in a job of their own, whose word is the only one that counts.

A file is passed when at least one test was collected, every collected test passed, and there were as many as are
recorded with the task. Skipped tests, expected failures and exit statuses are no passes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from gspo_agent.sandbox import Sandbox, SandboxLimits, TestFileResult, readable
from rewards.verdict import Class, TestVerdict, Verdict, explain, summary

_CLASSES = frozenset(get_args(Class))


async def judge(
    code: str,
    files: Sequence[Mapping[str, Any]],
    *,
    limits: SandboxLimits,
    sandbox: Sandbox,
    stop_at_failure: bool = False,
    deadline_s: float | None = None,
) -> Verdict:
    """Runs each {"test_file", "module"?, "count"?}, each test under `limits`, each file under the deadline."""
    started = time.monotonic()
    problem = _problem(files)
    if problem:
        return Verdict("task_error", 0, len(files), problem, [], 0.0)
    verdicts: list[TestVerdict] = []
    total = 0
    for file in files:
        module, count = file.get("module", "solution"), file.get("count")
        result = await sandbox.test_file(code, file["test_file"], module=module, limits=limits, deadline_s=deadline_s)
        found = _judge_one(result, count)
        verdicts += found
        total += max(len(found), count or 0)
        if stop_at_failure and any(test.verdict != "pass" for test in found):
            break
    return summary(verdicts, total, 1000 * (time.monotonic() - started))


def by_id(result: TestFileResult, wanted: Sequence[str]) -> dict[str, TestVerdict]:
    """A verdict for each of the `wanted` tests, by its id; whoever was judged knows the tests to be sound."""
    report = result.report
    if result.status != "ok":
        whole: tuple[Class, str, str] | None = (_class(result.status), "", "")
    else:  # what one test cannot do keeps the others from nothing
        refused = report["barred"] or (None if report["tests"] else report["refused"])
        whole = _problem_of({**report, "refused": refused}, None)
    if whole:
        return dict.fromkeys(wanted, _blamed(_failed(*whole, result.wall_s)))
    found = {
        test["id"]: _blamed(_failed(_class(test["class"]), _reason(test), test.get("text", ""), seconds))
        for test, seconds in zip(report["tests"], report["seconds"], strict=True)
    }
    missing = _failed("wrong_answer", "there is no such test in the file", "", 0.0)
    return {test: found.get(test, missing) for test in wanted}


def _blamed(test: TestVerdict) -> TestVerdict:
    """Whoever was judged has brought about that the tests cannot be run."""
    if test.verdict != "task_error":
        return test
    return dataclasses.replace(test, verdict="wrong_answer", reason=f"the tests cannot be run on it: {test.reason}")


def _problem(files: Sequence[Mapping[str, Any]]) -> str | None:
    if not files:
        return "the task has no tests"
    for number, file in enumerate(files, 1):
        if not isinstance(file.get("test_file"), str) or not file["test_file"].strip():
            return f"test file {number} has no 'test_file' with its source"
        if not str(file.get("module", "solution")).isidentifier():
            return f"test file {number}: module {file['module']!r} is no name of a module"
        count = file.get("count")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            return f"test file {number}: count {count!r} is not a number above 0"
    return None


def _judge_one(result: TestFileResult, count: int | None) -> list[TestVerdict]:
    """One verdict for each test; only one where the file did not get that far."""
    if result.status != "ok":
        words = "the tests ended their own process" if result.status == "task_error" else ""
        return [_failed(_class(result.status), words, "", result.wall_s)]
    report = result.report
    tests = [
        _failed(_class(test["class"]), _reason(test), test.get("text", ""), seconds)
        for test, seconds in zip(report["tests"], report["seconds"], strict=True)
    ]
    whole = _problem_of(report, count)
    # What went wrong with the file is said first, even where every test that ran has passed.
    return [_failed(*whole, result.wall_s), *(test for test in tests if test.verdict != "pass")] if whole else tests


def _problem_of(report: Mapping[str, Any], count: int | None) -> tuple[Class, str, str] | None:
    """What is wrong with a file as a whole: class, reason, error."""
    load, num_tests = report["load"], len(report["tests"])
    if report["refused"]:
        return "task_error", str(report["refused"]), ""
    if load:
        verdict: Class = "compile_error" if load["syntax"] else "runtime_error"
        return verdict, f"{explain(verdict, load['error'])} when it is imported", load["text"]
    if report["lost"] and not any(test["class"] == report["lost"] for test in report["tests"]):
        return _class(report["lost"]), "", ""
    if report["broken"]:
        if report["blamed"]:
            return "runtime_error", "runtime error: it lacks what the tests import, or fails in it", report["broken"]
        return "task_error", "the test file cannot be imported", report["broken"]
    if count is not None and num_tests != count:
        return "wrong_answer", f"{num_tests} tests were collected instead of {count}", ""
    if num_tests == 0:
        return "task_error", "the test file holds no tests", ""
    return None


def _class(said: str) -> Class:
    return said if said in _CLASSES else "runtime_error"  # type: ignore[return-value]


def _reason(test: Mapping[str, str]) -> str:
    if test.get("error") == "skipped":
        return "wrong answer: the test was skipped"
    return explain(_class(test["class"]), test.get("error", ""))


def _failed(verdict: Class, reason: str, text: str, seconds: float) -> TestVerdict:
    error = readable(text.encode("utf-8", "replace"))
    return TestVerdict(verdict, reason or explain(verdict, ""), "", error, 1000 * seconds)
