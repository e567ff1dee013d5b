from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.errors import ConfigError
from gspo_agent.sandbox import Sandbox, SandboxLimits
from rewards.unit_tests import Verdict, judge
from tests.sandbox import cases, survivors

JUDGED_KINDS = ("stdio", "call", "testfile")
TIGHT = SandboxLimits(cpu_s=0.5, wall_s=3.0, memory_bytes=128 << 20)
FAILURES = {"wrong_answer", "runtime_error", "compile_error", "time_limit", "memory_limit", "output_limit"}
ECHO = "print(input())"
ADD = "def add(a, b): return a + b"
SUMS = [{"args": [1, 2], "expected": 3}, {"args": [2, 2], "expected": 4}]


def judged() -> list[Any]:
    return [pytest.param(case, id=case["id"]) for kind in JUDGED_KINDS for case in cases.of_kind(kind)]


async def verdict_of(case: Mapping[str, Any], sandbox: Sandbox) -> Verdict:
    compare = case.get("compare") if case["kind"] == "call" else None  # its two checkers are our one default
    return await judge(
        case["code"],
        cases.tests_of(case),
        kind=case["kind"],
        entry_point=case.get("fn"),
        cls=case.get("cls"),
        compare=compare,
        limits=TIGHT,
        sandbox=sandbox,
    )


def right(case: Mapping[str, Any]) -> set[str]:
    return {"pass"} if case["expected"] == "pass" else set(case.get("fail_as") or FAILURES)


@pytest.mark.parametrize("case", judged())
async def test_case_gets_its_verdict(case: dict[str, Any], sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in case.get("env_probe", {}).items():
        monkeypatch.setenv(name, value)
    verdict = await verdict_of(case, sandbox)
    left = survivors.programs(sandbox.server())
    assert verdict.verdict in right(case), f"{verdict.reason}; {case['why']}"
    assert not survivors.alive(left)


def test_every_kind_of_case_is_judged() -> None:
    judged_kinds = {*JUDGED_KINDS, "session"}  # sessions: tests/sandbox/test_session.py
    assert {case["kind"] for case in cases.load()} == judged_kinds


async def test_verdict_counts_and_explains(sandbox: Sandbox) -> None:
    tests = [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "SECRET"}, {"stdin": "3", "stdout": "3"}]
    verdict = await judge(ECHO, tests, sandbox=sandbox)
    assert (verdict.verdict, verdict.passed, verdict.total) == ("wrong_answer", 2, 3)
    assert verdict.fraction == pytest.approx(2 / 3)
    assert verdict.scored
    assert [test.verdict for test in verdict.tests] == ["pass", "wrong_answer", "pass"]
    assert verdict.reason == "2 of 3 tests passed; test 2: wrong answer: the output differs at token 1"


async def test_judge_stops_at_a_failure_when_told(sandbox: Sandbox) -> None:
    tests = [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "0"}, {"stdin": "3", "stdout": "3"}]
    verdict = await judge(ECHO, tests, sandbox=sandbox, stop_at_failure=True)
    assert (verdict.verdict, verdict.passed, verdict.total, len(verdict.tests)) == ("wrong_answer", 1, 3, 2)


async def test_reason_names_the_exception_without_its_message(sandbox: Sandbox) -> None:
    code = "class Found(Exception): pass\ndef add(a, b): raise Found(f'the input was {a}')"
    verdict = await judge(code, SUMS, kind="call", entry_point="add", sandbox=sandbox)
    assert verdict.verdict == "runtime_error"
    assert verdict.reason == "0 of 2 tests passed; test 1: runtime error (Found)"
    assert "the input was 1" in verdict.tests[0].error
    assert "inside" not in verdict.tests[0].error


async def test_code_that_does_not_compile_is_a_compile_error(sandbox: Sandbox) -> None:
    for kind, tests in (("stdio", [{"stdin": "", "stdout": ""}]), ("call", SUMS)):
        verdict = await judge("def add(a, b:", tests, kind=kind, entry_point="add", sandbox=sandbox)
        assert verdict.verdict == "compile_error"
        assert "(SyntaxError)" in verdict.reason


@pytest.mark.parametrize(
    ("tests", "options", "reason"),
    [
        ([], {}, "no tests"),
        ([{"stdin": ""}], {}, "test 1 has no 'stdout'"),
        ([{"stdin": "", "stdout": 3}], {}, "must be text"),
        (SUMS, {"kind": "call"}, "names no function"),
        ([{"args": 3, "expected": 3}], {"kind": "call", "entry_point": "add"}, "args must be a list"),
        ([{"args": [{"$what": 1}], "expected": 3}], {"kind": "call", "entry_point": "add"}, "unknown tag"),
    ],
)
async def test_unusable_tests_are_a_task_error_and_never_a_score(
    tests: list[Any], options: dict[str, Any], reason: str, sandbox: Sandbox
) -> None:
    verdict = await judge(ADD, tests, sandbox=sandbox, **options)
    assert verdict.verdict == "task_error"
    assert not verdict.scored
    assert reason in verdict.reason


async def test_checker_decides_on_plain_data(sandbox: Sandbox) -> None:
    tests = [{"args": [9, 1], "expected": None}]
    options: dict[str, Any] = {"kind": "call", "entry_point": "add", "sandbox": sandbox}
    assert (await judge(ADD, tests, checker=lambda test, value: value == sum(test["args"]), **options)).passed == 1
    assert (await judge(ADD, tests, checker=lambda test, value: False, **options)).verdict == "wrong_answer"
    broken = await judge(ADD, tests, checker=lambda test, value: value["x"], **options)
    assert broken.verdict == "task_error"
    assert not broken.scored


async def test_unknown_comparison_is_refused_with_the_known_ones(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="'unordered' is not for tests of kind 'stdio'; known are tokens"):
        await judge(ECHO, [{"stdin": "", "stdout": ""}], compare="unordered", sandbox=sandbox)


async def test_lost_sandbox_is_an_infrastructure_error_and_never_a_score() -> None:
    async with Sandbox(max_running=1) as doomed:
        started = doomed.server

        def start_and_kill(**what: Any) -> Any:
            server = started(**what)
            os.kill(server.pid, signal.SIGKILL)
            server._process.wait()
            return server

        doomed.server = start_and_kill  # type: ignore[method-assign]
        verdict = await judge(ADD, SUMS, kind="call", entry_point="add", sandbox=doomed)
    assert (verdict.verdict, verdict.passed, verdict.total) == ("infra_error", 0, 2)
    assert not verdict.scored


async def test_answer_sent_ahead_of_its_question_is_an_error(sandbox: Sandbox) -> None:
    """Even one that would be right: it does not carry the question's nonce."""
    code = """
import os, struct, threading, time
def ahead():
    time.sleep(0.1)
    body = bytes(16) + b'{"value":7}'
    os.write(3, struct.pack(">I", len(body)) + body)
def f(n):
    if n == 0:
        threading.Thread(target=ahead).start()
        return 0
    time.sleep(0.5)
    return 7
"""
    tests = [{"args": [0], "expected": 0}, {"args": [1], "expected": 7}]
    verdict = await judge(code, tests, kind="call", entry_point="f", sandbox=sandbox)
    assert [test.verdict for test in verdict.tests] == ["pass", "runtime_error"]


async def test_calls_after_a_crash_are_made_in_a_new_process(sandbox: Sandbox) -> None:
    code = "import os\ndef f(n):\n    if n == 1: os._exit(0)\n    return n"
    tests = [{"args": [n], "expected": n} for n in range(4)]
    verdict = await judge(code, tests, kind="call", entry_point="f", sandbox=sandbox)
    assert [test.verdict for test in verdict.tests] == ["pass", "runtime_error", "pass", "pass"]


@pytest.mark.parametrize("kind", ["stdio", "call", "testfile"])
async def test_deadline_of_a_whole_judgement_leaves_nothing_waiting(kind: Any, sandbox: Sandbox) -> None:
    slow = "import time\ndef add(a, b): time.sleep(0.35); return a + b"
    tests: list[dict[str, Any]] = [{"args": [n, 1], "expected": n + 1} for n in range(50)]
    if kind == "stdio":
        slow, tests = "import time; time.sleep(0.35); print(input())", [{"stdin": "1", "stdout": "1"}] * 50
    if kind == "testfile":
        file = "import pytest, solution\n@pytest.mark.parametrize('n', range(50))\n"
        tests = [{"test_file": file + "def test(n): assert solution.add(n, 1) == n + 1", "count": 50}]
    started = time.monotonic()
    verdict = await judge(slow, tests, kind=kind, entry_point="add", sandbox=sandbox, deadline_s=2)
    assert time.monotonic() - started < 30
    assert (verdict.verdict, verdict.total) == ("time_limit", 50)
    assert 0 <= verdict.passed < 10
    if kind != "testfile":
        assert verdict.passed
        assert verdict.tests[-1].reason == "time limit of all tests together"


@pytest.mark.parametrize(("pressure", "jobs"), [("95.20", 2), ("3.00", 1)])
async def test_what_only_the_clock_stopped_is_tried_once_more_while_the_machine_is_short_of_something(
    pressure: str, jobs: int, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").write_text(f"some avg10={pressure} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00\n")
    monkeypatch.setattr("gspo_agent.sandbox.pressure.DIRECTORY", tmp_path)
    started: list[Any] = []
    channel = sandbox.channel

    def counted(**options: Any) -> Any:
        started.append(options)
        return channel(**options)

    monkeypatch.setattr(sandbox, "channel", counted)
    limits = SandboxLimits(cpu_s=2.0, wall_s=0.3)
    code = "import time\ntime.sleep(0 if input() == '1' else 60)\nprint(1)"
    tests = [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "1"}, {"stdin": "1", "stdout": "1"}]
    verdict = await judge(code, tests, limits=limits, sandbox=sandbox)
    assert [test.verdict for test in verdict.tests] == ["pass", "time_limit", "pass"]
    assert len(started) == jobs
