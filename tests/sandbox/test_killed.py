"""kill -9 of a job, of the fork server and of the trainer: verdicts still come out, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.sandbox import Sandbox, SandboxSettings
from rewards.unit_tests import judge
from tests.sandbox import confinement, survivors

NAP = "import time; time.sleep(0.25)\n"
TESTS: dict[str, list[dict[str, Any]]] = {
    "stdio": [{"stdin": "1", "stdout": "2"}, {"stdin": "2", "stdout": "3"}],
    "call": [{"args": [1], "expected": 2}, {"args": [2], "expected": 3}],
    "testfile": [{"test_file": "import solution\ndef test(): assert solution.f(1) == 2\n"}],
}
CODE = {
    "stdio": NAP + "print(int(input()) + 1)",
    "call": "def f(x):\n    import time; time.sleep(0.25)\n    return x + 1",
    "testfile": "def f(x):\n    import time; time.sleep(0.5)\n    return x + 1",
}
TRAINER = """
import asyncio, sys
from gspo_agent.sandbox import Sandbox, SandboxSettings

async def main():
    sandbox = Sandbox(SandboxSettings(*sys.argv[1:]))
    session = await sandbox.session()
    await session.cell("open('left', 'w').write('x')")
    print(sandbox.server().pid, flush=True)
    await sandbox.run("import time; open('left', 'w').write('x'); time.sleep(60)")

asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["ns", "landlock"])
def settings(request: pytest.FixtureRequest) -> SandboxSettings:
    if request.param == "ns":
        return SandboxSettings("ns")
    python = confinement.interpreter()
    if python is None:
        pytest.skip("no interpreter that every user may run")
    return SandboxSettings("landlock", python)


@pytest.fixture
def own(settings: SandboxSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A sandbox to be broken, in whose directory nothing is left."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        sandbox = Sandbox(settings)
        yield sandbox
        sandbox.close_now()
        assert not os.listdir(scratch)


@pytest.mark.parametrize("victim", ["supervisor", "program"])
async def test_verdict_of_a_killed_job_is_that_of_its_second_try(victim: str, own: Sandbox) -> None:
    server = survivors.server_of(own.server())
    kinds = ("stdio", "call")
    judged = [
        asyncio.create_task(judge(CODE[kind], TESTS[kind], kind=kind, entry_point="f", sandbox=own)) for kind in kinds
    ]
    supervisors, programs = await jobs_of(server, 2)
    for pid in supervisors if victim == "supervisor" else programs:
        os.kill(pid, signal.SIGKILL)
    assert not survivors.alive(supervisors | programs)
    assert [(verdict.verdict, verdict.passed) for verdict in await asyncio.gather(*judged)] == [("pass", 2)] * 2


@pytest.mark.parametrize("victim", [0, 1], ids=["tests", "solution"])
async def test_verdict_of_a_test_file_whose_side_was_killed_is_that_of_its_second_try(
    victim: int, sandbox: Sandbox
) -> None:
    server = survivors.server_of(sandbox.server(testing=True))
    judged = asyncio.create_task(judge(CODE["testfile"], TESTS["testfile"], kind="testfile", sandbox=sandbox))
    _, programs = await jobs_of(server, 2)
    await asyncio.sleep(0.2)
    os.kill(sorted(programs)[victim], signal.SIGKILL)
    assert (await judged).verdict == "pass"


async def test_code_that_kills_itself_every_time_has_failed(sandbox: Sandbox) -> None:
    for kind, code in (
        ("stdio", "import os; print(int(input()) + 1, flush=True); os.kill(os.getpid(), 9)"),
        ("call", "import os\ndef f(x): os.kill(os.getpid(), 9)"),
        ("testfile", "import os\ndef f(x): os.kill(os.getpid(), 9)"),
    ):
        verdict = await judge(code, TESTS[kind], kind=kind, entry_point="f", sandbox=sandbox)  # type: ignore[arg-type]
        assert (verdict.verdict, verdict.passed) == ("runtime_error", 0)


async def test_verdict_outlives_the_fork_server_and_nothing_of_it_is_left(own: Sandbox) -> None:
    first = own.server()
    server = survivors.server_of(first)
    judged = asyncio.create_task(judge(CODE["stdio"], TESTS["stdio"], sandbox=own))
    supervisors, programs = await jobs_of(server, 1)
    os.kill(server, signal.SIGKILL)
    assert (await judged).verdict == "pass"
    assert not survivors.alive(supervisors | programs | {server, first.pid})
    assert own.server() is not first


def test_killed_trainer_leaves_no_process_and_no_file(settings: SandboxSettings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o777)
        with subprocess.Popen(
            [sys.executable, "-c", TRAINER, settings.backend, settings.python],
            env={**os.environ, "TMPDIR": scratch, "PYTHONPATH": str(confinement.ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as trainer:
            assert trainer.stdout is not None
            below = survivors.descendants(int(trainer.stdout.readline()))
            assert len(below) >= 4
            os.kill(trainer.pid, signal.SIGKILL)
        assert not survivors.alive(below)
        assert not os.listdir(scratch)


async def jobs_of(server: int, number: int) -> tuple[set[int], set[int]]:
    """Supervisors and programs, once there are so many of both."""
    while True:
        children = survivors.children()
        supervisors = children.get(server, set())
        programs = set().union(*(children.get(pid, set()) for pid in supervisors))
        if len(programs) == number:
            return supervisors, programs
        await asyncio.sleep(0.01)
