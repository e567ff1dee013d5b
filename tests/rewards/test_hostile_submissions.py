"""No submission decides its own verdict, and none gets out of having one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gspo_agent.sandbox import Sandbox, SandboxLimits
from rewards.unit_tests import Verdict, judge
from tests.rewards.hostile_submissions import SUBMISSIONS, Submission
from tests.sandbox import survivors

TIGHT = SandboxLimits(cpu_s=0.3, wall_s=1.5, memory_bytes=128 << 20)


async def judged(case: Submission, sandbox: Sandbox) -> Verdict:
    options: dict[str, Any] = {"entry_point": "f", "compare": case.compare} if case.kind == "call" else {}
    return await judge(case.code, case.tests, kind=case.kind, limits=TIGHT, sandbox=sandbox, **options)  # type: ignore[arg-type]


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in SUBMISSIONS.items()]


@pytest.mark.parametrize("name", NAMES)
async def test_submission_gets_a_verdict_that_is_right(name: str, sandbox: Sandbox) -> None:
    case = SUBMISSIONS[name]
    server = sandbox.server(testing=case.kind == "testfile")
    verdict = await judged(case, sandbox)
    assert verdict.verdict in case.right, verdict
    assert server.alive
    assert not survivors.alive(survivors.programs(server))


BOMBS = ("inodes", "disk", "descriptors", "children that make children", "memory of many processes", "backtracking")
HONEST = "input()\nwith open('x', 'w') as f: f.write('1')\nprint(sum(map(int, input().split())))"


async def test_honest_program_beside_hostile_ones_gets_its_own_verdict() -> None:
    tests = [{"stdin": f"2\n{n} 1\n", "stdout": f"{n + 1}\n"} for n in range(10)]
    async with Sandbox(max_running=len(BOMBS) + 2) as own:
        own.server()
        hostile = [asyncio.create_task(judged(SUBMISSIONS[name], own)) for name in BOMBS]
        honest = await asyncio.gather(*[judge(HONEST, tests, limits=TIGHT, sandbox=own) for _ in range(2)])
        verdicts = await asyncio.gather(*hostile)
    assert [verdict.verdict for verdict in honest] == ["pass", "pass"], honest
    for name, verdict in zip(BOMBS, verdicts, strict=True):
        assert verdict.verdict in SUBMISSIONS[name].right, (name, verdict)


async def test_no_job_sees_the_files_processes_or_pipes_of_another_one() -> None:
    keeps = (
        "import os, time\nfor place in ('.', '/tmp', '/dev/shm'):\n"
        "    with open(place + '/secret', 'w') as f: f.write('SECRET')\n"
        "os.mkfifo('/tmp/pipe')\ntime.sleep(0.5)\nprint(sorted(os.listdir('/tmp')))"
    )
    looks = (
        "import os, time\nseen = set()\nfor _ in range(4):\n    time.sleep(0.1)\n"
        "    seen |= {f for top in ('/box', '/tmp/', '/dev/shm/') for _, _, files in os.walk(top) for f in files}\n"
        "    seen |= {p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()}\nprint(seen)"
    )
    async with Sandbox(max_running=4) as own:
        kept, seen = await asyncio.gather(own.run(keeps), own.run(looks))
    assert (kept.stdout, seen.stdout) == (b"['pipe', 'secret']\n", b"set()\n"), (kept, seen)


STARVES = """
import os, time
calls = 0
def f(k):
    global calls
    calls += 1
    if calls > 5: time.sleep(60)
    end, children = time.monotonic() + 0.28, []
    for _ in range(20):
        children.append(os.fork())
        if not children[-1]:
            while True: pass
    while time.monotonic() < end: pass
    for child in children: os.kill(child, 9)
    for child in children: os.waitpid(child, 0)
    return k
"""


@pytest.mark.slow
async def test_who_takes_its_own_processor_away_has_passed_its_limit(sandbox: Sandbox) -> None:
    """And was not starved by the machine, which would save it from its score."""
    limits = SandboxLimits(cpu_s=1.0, wall_s=0.4)
    tests = [{"args": [n], "expected": n} for n in range(12)]
    verdict = await judge(STARVES, tests, kind="call", entry_point="f", limits=limits, sandbox=sandbox)
    assert (verdict.verdict, verdict.scored) == ("time_limit", True), verdict
