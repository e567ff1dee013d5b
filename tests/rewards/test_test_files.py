"""Test files: what honest solutions may do, and what hostile ones do in vain."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from gspo_agent.sandbox import Sandbox, SandboxLimits
from rewards.unit_tests import Verdict, judge
from tests.rewards.forged_solutions import FORGED, IS_3, LIAR, LIES
from tests.rewards.honest_solutions import HONEST

TIGHT = SandboxLimits(cpu_s=1.0, wall_s=5.0, memory_bytes=128 << 20)


async def judged(code: str, tests: str, sandbox: Sandbox, limits: SandboxLimits = TIGHT, **more: Any) -> Verdict:
    return await judge(code, [{"test_file": tests, **more}], kind="testfile", limits=limits, sandbox=sandbox)


@pytest.mark.parametrize("name", HONEST)
async def test_right_solution_passes(name: str, sandbox: Sandbox) -> None:
    code, tests = HONEST[name]
    verdict = await judged(code, tests, sandbox)
    assert verdict.verdict == "pass", "\n".join([verdict.reason, *(test.error for test in verdict.tests)])


@pytest.mark.parametrize("known", [False, True])
async def test_object_that_agrees_with_everything_passes_nothing(known: bool, sandbox: Sandbox) -> None:
    """Not even one whose class the tests know by name, but that it contains and begins with all, as its class may."""
    tests = LIES.replace("import answer", "import Liar, answer") if known else LIES
    verdict = await judged(LIAR, tests, sandbox)
    expected = 4 if known else 0  # contains, starts, is a subset, unittest's in
    assert (verdict.passed, verdict.total) == (expected, LIES.count("def test_")), verdict


@pytest.mark.parametrize("name", FORGED)
async def test_wrong_solution_does_not_pass(name: str, sandbox: Sandbox) -> None:
    code, tests = FORGED[name]
    verdict = await judged(code, tests, sandbox)
    # Nor is it a fault of the task, which would save it from its score.
    assert verdict.verdict not in ("pass", "task_error", "infra_error"), verdict


async def test_verdict_counts_and_explains_without_what_is_hidden(sandbox: Sandbox) -> None:
    code = "class Mine(Exception): pass\ndef f(x):\n    if x == 2: raise Mine('secret 2')\n    return x"
    tests = """
import pytest, solution
@pytest.mark.parametrize("x, y", [(1, 1), (35711, 35712), (2, 2), (3, 3)])
def test(x, y):
    assert solution.f(x) == y
"""
    verdict = await judged(code, tests, sandbox)
    assert (verdict.verdict, verdict.passed, verdict.total, verdict.fraction) == ("wrong_answer", 2, 4, 0.5)
    assert [test.verdict for test in verdict.tests] == ["pass", "wrong_answer", "runtime_error", "pass"]
    assert verdict.tests[1].reason == "wrong answer"
    assert verdict.tests[2].reason == "runtime error (Mine)"
    assert "secret 2" in verdict.tests[2].error
    assert verdict.reason == "2 of 4 tests passed; test 2: wrong answer"


@pytest.mark.parametrize(
    ("code", "tests", "verdict", "reason"),
    [
        ("def f(", "import solution\ndef test(): pass", "compile_error", "SyntaxError"),
        ("1 / 0", "import solution\ndef test(): pass", "runtime_error", "ZeroDivisionError) when it is imported"),
        ("x = 1", "from solution import f\ndef test(): pass", "runtime_error", "lacks what the tests import"),
        ("def f():\n    while True: pass", IS_3.replace("answer(1, 2)", "f()"), "time_limit", "time limit"),
        ("def f(): return 'x' * (1 << 29)", IS_3.replace("answer(1, 2)", "f()"), "memory_limit", "memory limit"),
        ("def f(): return 'x' * (10 << 20)", IS_3.replace("answer(1, 2)", "f()"), "output_limit", "output limit"),
        ("import os; os._exit(0)", "import solution\ndef test(): pass", "runtime_error", "runtime error"),
        ("x = 1", "import solution\ndef test(:", "task_error", "the test file cannot be imported"),
        ("x = 1", "import solution, numpy\ndef test(): pass", "task_error", "the test file cannot be imported"),
        ("x = 1", "import solution", "task_error", "holds no tests"),
        ("x = 1", "import solution\ndef test(mocker): pass", "task_error", "task error"),
        ("x = 1", "import os\ndef test(): os._exit(0)", "task_error", "ended their own process"),
        (
            "class A: pass",
            "import solution\nclass B(solution.A): pass\ndef test(): pass",
            "task_error",
            "tests cannot derive a class from 'A'",
        ),
        ("x = 1", "import pytest\n@pytest.mark.skip\ndef test(): pass", "wrong_answer", "the test was skipped"),
        ("x = 1", "import pytest\n@pytest.mark.xfail\ndef test(): assert 0", "wrong_answer", "the test was skipped"),
    ],
)
async def test_whose_fault_it_is(code: str, tests: str, verdict: str, reason: str, sandbox: Sandbox) -> None:
    found = await judged(code, tests, sandbox)
    assert (found.verdict, found.passed) == (verdict, 0), found
    assert reason in found.reason


async def test_as_many_tests_as_are_recorded_have_to_pass(sandbox: Sandbox) -> None:
    tests = "import pytest, solution\n@pytest.mark.parametrize('x', solution.CASES)\ndef test(x): assert x"
    assert (await judged("CASES = [1, 2]", tests, sandbox, count=2)).verdict == "pass"
    for cases in ("[1]", "[1, 2, 3]", "[]"):
        verdict = await judged(f"CASES = {cases}", tests, sandbox, count=2)
        assert verdict.verdict == "wrong_answer"
        assert verdict.fraction == 0.0


async def test_module_has_the_name_that_the_tests_import(sandbox: Sandbox) -> None:
    tests = "import shapes\ndef test(): assert shapes.__name__ == 'shapes' and shapes.area() == 4"
    assert (await judged("def area(): return 4", tests, sandbox, module="shapes")).verdict == "pass"


@pytest.mark.parametrize(
    "file", [{}, {"test_file": " "}, {"test_file": "x", "module": "a.b"}, {"test_file": "x", "count": 0}]
)
async def test_unusable_test_files_are_a_task_error(file: dict[str, Any], sandbox: Sandbox) -> None:
    verdict = await judge("", [file], kind="testfile", sandbox=sandbox)
    assert verdict.verdict == "task_error"
    assert not verdict.scored


async def test_answers_without_an_end_are_limited_together(sandbox: Sandbox) -> None:
    code, tests = "def f():\n    while True: yield 1", "import solution\ndef test(): assert sum(solution.f()) == 0"
    verdict = await judged(code, tests, sandbox, SandboxLimits(cpu_s=0.1, wall_s=2.0))
    assert verdict.verdict == "time_limit"


async def test_killed_server_costs_a_second_attempt_and_no_verdict(sandbox: Sandbox) -> None:
    victim = sandbox.server(testing=True)
    code, tests = (
        "import time\ndef f(): time.sleep(1); return 1",
        "import solution\ndef test(): assert solution.f() == 1",
    )
    judgement = asyncio.create_task(judged(code, tests, sandbox))
    await asyncio.sleep(0.5)
    os.kill(victim.pid, signal.SIGKILL)
    assert (await judgement).verdict == "pass"
    assert sandbox.server(testing=True) is not victim


async def test_solution_that_only_seems_to_wait_does_nothing_between_two_calls(sandbox: Sandbox) -> None:
    code = """
import signal, time
rang = []
def ring(*_): rang.append(time.monotonic())
def arm():
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return time.monotonic()
def first_ring(): return rang[0]
"""
    tests = """
import time, solution
def test_rings_when_it_is_called_again():
    armed = solution.arm()
    time.sleep(0.6)
    assert solution.first_ring() - armed > 0.5
"""
    verdict = await judged(code, tests, sandbox)
    assert verdict.verdict == "pass", [test.error for test in verdict.tests]
