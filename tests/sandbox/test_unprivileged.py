"""The same isolation for an ordinary user: one id, and a user namespace for each program instead of an id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from gspo_agent.sandbox.testfile import pytest_packages
from tests.sandbox import cases, confinement

ROOT, NOBODY = confinement.ROOT, confinement.NOBODY
PROGRAM = """
import asyncio, json, os, sys, tempfile
sys.path[:0] = sys.argv[1:]
from gspo_agent.sandbox import Image, Sandbox, SandboxLimits
from rewards.unit_tests import judge
from tests.sandbox import cases, remains
from tests.sandbox.test_session import check

LIMITS = SandboxLimits(cpu_s=0.5, wall_s=3, memory_bytes=128 << 20)
FAILURES = {"wrong_answer", "runtime_error", "compile_error", "time_limit", "memory_limit", "output_limit"}

async def main():
    wrong, count = [], 0
    async with Sandbox() as sandbox:
        server = sandbox.server()
        for case in cases.load():
            count += 1
            os.environ.update(case.get("env_probe", {}))
            if case["kind"] == "session":
                await check(case, sandbox)
                continue
            compare = case.get("compare") if case["kind"] == "call" else None
            verdict = await judge(case["code"], cases.tests_of(case), kind=case["kind"], entry_point=case.get("fn"),
                                  cls=case.get("cls"), compare=compare, limits=LIMITS, sandbox=sandbox)
            right = {"pass"} if case["expected"] == "pass" else set(case.get("fail_as") or FAILURES)
            if verdict.verdict not in right:
                wrong.append((case["id"], verdict.verdict))
        for search in remains.CHECKS:
            await search(sandbox)
        bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass"
        beside = "import os\\nfor _ in range(200):\\n    if os.fork() == 0: os._exit(0)\\n    os.wait()\\nprint('ok')"
        results = await asyncio.gather(sandbox.run(bomb, limits=LIMITS), sandbox.run(beside))
        for target in (0, -1, 1):
            await sandbox.run(f"import os, signal\\nos.kill({target}, signal.SIGKILL)")
        assert sandbox.server() is server and server.alive
        async with await sandbox.session() as session:
            await session.cell("import os, signal")
            for number in (signal for signal in range(1, 32) if signal not in (9, 19)):
                await session.cell(f"try: os.kill(1, {number})\\nexcept OSError: pass")
            output = (await session.cell("6 * 7")).output
        moves = "import os\\nprint(os.listdir('/box'))\\nos.rename('/box/work', '/box/kept')\\nos.mkdir('/box/more')"
        moved = await sandbox.run_many(moves, [""] * 3)
        with tempfile.TemporaryDirectory() as directory:
            os.makedirs(f"{directory}/lib/python3/site-packages")
            command = "cat a; echo 2 > b; mkdir c; echo 3 > c/d; chmod 0 a b c; ls -d /site/*"
            image = Image(sandbox, directory)
            made = await image.run({"a": ("file", b"1\\n")}, command, SandboxLimits())
            gone = await image.run({"a": ("file", b"1\\n")}, ["-c", moves], SandboxLimits())
    shown = [made.output.decode(), sorted((path, file and file[1].decode()) for path, file in made.changes.items())]
    moved = [[run.stdout.decode() for run in moved], gone.status, list(gone.changes.items()), gone.left_out]
    print(json.dumps([os.getuid(), server.own_uids, wrong, count, results[1].stdout.decode(), output, shown, moved]))

asyncio.run(main())
"""


def _copy_pytest(directory: Path) -> None:
    """To where another user may read it, for interpreters that have none."""
    for source in map(Path, pytest_packages()):
        if source.is_dir():
            shutil.copytree(source, directory / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, directory)
    directory.chmod(0o755)


def _run(interpreter: str, packages: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter, "-B", "-c", PROGRAM, str(ROOT), packages],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
def test_ordinary_user_gets_the_same_verdicts() -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests already run as an ordinary user")
    interpreter = confinement.interpreter()
    if interpreter is None:
        pytest.skip("no interpreter of at least Python 3.11 is readable for another user")
    with tempfile.TemporaryDirectory() as packages:
        _copy_pytest(Path(packages))
        said = _run(interpreter, packages)
    assert said.returncode == 0, said.stderr
    uid, own_uids, wrong, count, beside, output, workspace, moved = json.loads(said.stdout)
    assert (uid, own_uids) == (NOBODY, False)
    assert wrong == []
    assert count == len(cases.load())
    assert beside == "ok\n"  # a neighbour's fork bomb uses up its own processes only
    assert output == "42\n"  # no signal from inside reaches the supervisor
    assert workspace == ["1\n/site/0\n", [["b", "2\n"], ["c/d", "3\n"]]]
    # Who moves its directories away leaves nothing for the next run, and has a result all the same.
    assert moved == [["['tmp', 'work']\n"] * 3, "ok", [["a", None]], ["'.': No such file or directory"]]
