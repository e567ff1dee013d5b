from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import Sandbox, SandboxLimits
from tests.sandbox import cases, survivors

TIGHT = SandboxLimits(cpu_s=0.3, wall_s=2.0, memory_bytes=128 << 20)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases.of_kind("session")])
async def test_case(case: dict[str, Any], sandbox: Sandbox) -> None:
    await check(case, sandbox)


async def check(case: dict[str, Any], sandbox: Sandbox) -> None:
    async with await sandbox.session(TIGHT) as session:
        for code, expected in case["steps"]:
            result = await session.cell(code)
            if expected is None:
                assert (result.output, result.status) == ("", "ok"), case["why"]
            elif expected == "!DEAD":
                assert (result.status, result.alive) == ("dead", False), case["why"]
            elif expected == "!TIMEOUT":
                assert result.status == "time_limit", case["why"]
            elif expected.startswith("!"):
                assert result.status == "runtime_error"
                assert expected[1:] in result.output, case["why"]
            else:
                assert result.output == expected + "\n", case["why"]


async def test_traceback_is_short_and_names_the_cell(sandbox: Sandbox) -> None:
    async with await sandbox.session() as session:
        await session.cell("def f(x):\n    return 1 / x")
        result = await session.cell("f(0)")
    assert result.output == (
        "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 1, in <module>\n    f(0)\n'
        '  File "<cell 1>", line 2, in f\n    return 1 / x\n'
        "ZeroDivisionError: division by zero\n"
    )


async def test_output_keeps_its_order_and_belongs_to_its_cell(sandbox: Sandbox) -> None:
    async with await sandbox.session() as session:
        first = await session.cell("import sys\nprint('a'); print('b', file=sys.stderr); print('c', end='')")
        assert first.output in ("a\nb\nc", "b\na\nc")
        assert (await session.cell("'d'")).output == "'d'\n"
        assert (await session.cell("import os; os.write(1, b'raw\\n'); None")).output == "raw\n"


async def test_interrupted_cell_keeps_the_variables(sandbox: Sandbox) -> None:
    async with await sandbox.session(TIGHT) as session:
        await session.cell("x = 7")
        stopped = await session.cell("while True: pass")
        assert (stopped.status, stopped.alive) == ("time_limit", True)
        assert "KeyboardInterrupt" in stopped.output
        assert "inside" not in stopped.output
        assert stopped.cpu_s > 0.9 * TIGHT.cpu_s  # the limit counts whatever else runs in the job, too
        assert stopped.output.endswith("variables are kept.\n")
        assert (await session.cell("x")).output == "7\n"


async def test_cell_that_heeds_no_interrupt_ends_the_session(sandbox: Sandbox) -> None:
    async with await sandbox.session(TIGHT) as session:
        stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        result = await session.cell(stubborn)
        assert (result.status, result.alive) == ("time_limit", False)
        assert result.output.endswith("variables are lost.\n")
        assert (await session.cell("1")).status == "dead"


async def test_memory_limit_ends_the_session(sandbox: Sandbox) -> None:
    async with await sandbox.session(TIGHT) as session:
        result = await session.cell("x = bytearray(200_000_000)\nwhile True: pass")
        assert (result.status, result.alive) == ("memory_limit", False)


async def test_long_output_is_cut_in_the_middle_and_the_session_goes_on(sandbox: Sandbox) -> None:
    async with await sandbox.session(SandboxLimits(output_bytes=100_000)) as session:
        result = await session.cell("print('x' * 50_000)", max_bytes=100)
        assert "49901 bytes left out" in result.output
        assert len(result.output) < 200
        flooded = await session.cell("while True: print('y' * 1000)")
        assert flooded.status == "output_limit"
        assert (await session.cell("1 + 1")).output == "2\n"


async def test_idle_session_uses_no_processor(sandbox: Sandbox) -> None:
    async with await sandbox.session() as session:
        before = survivors.descendants(sandbox.server().pid)
        await session.cell("import threading\nn = 0\ndef spin():\n    global n\n    while True: n += 1")
        await session.cell("threading.Thread(target=spin, daemon=True).start()")
        spinning = sum(_cpu_ticks(pid) for pid in before)
        await asyncio.sleep(0.3)
        assert sum(_cpu_ticks(pid) for pid in before) - spinning <= 2
        assert int((await session.cell("n")).output) > 0


_TIMER = """import signal
def spin(*_):
    while True: pass
signal.signal(signal.SIGALRM, spin)
signal.setitimer(signal.ITIMER_REAL, 0.02)"""

# Finds the harness in its own process, and says by itself that the cell has ended.
_FORGE = """import gc, os, struct
questions = next(found for found in gc.get_objects() if type(found).__name__ == "Questions")
answer = struct.pack(">I", 17) + questions._nonce + b"o"
os.write(3, answer)"""


@pytest.mark.parametrize("code", [_TIMER, _FORGE + "\nwhile True: pass"], ids=["timer", "forged"])
async def test_session_that_only_seems_to_wait_uses_no_processor(code: str, sandbox: Sandbox) -> None:
    async with await sandbox.session() as session:
        assert (await session.cell(code)).status == "ok"
        await asyncio.sleep(0.15)
        processes = survivors.descendants(sandbox.server().pid)
        spent = sum(_cpu_ticks(pid) for pid in processes)
        await asyncio.sleep(0.3)
        assert sum(_cpu_ticks(pid) for pid in processes) - spent <= 2


async def test_answer_ahead_of_its_cell_is_none(sandbox: Sandbox) -> None:
    async with await sandbox.session() as session:
        forged = await session.cell(_FORGE + "\nimport time; time.sleep(0.01)\nos.write(3, answer)\ntime.sleep(60)")
        assert (forged.output, forged.status) == ("", "ok")
        await asyncio.sleep(0.03)
        result = await session.cell("1 + 1")
        assert (result.output, result.status) == ("The process ended; variables are lost.\n", "dead")


async def test_session_of_a_killed_fork_server_says_so() -> None:
    async with Sandbox() as own:
        session = await own.session()
        os.kill(own.server().pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the session was lost"):  # noqa: PT012
            async with asyncio.timeout(10):
                while True:  # a kill takes a moment to arrive, and until then the session answers
                    await session.cell("1")
        assert not session.alive
        async with await own.session() as second:
            assert (await second.cell("1")).output == "1\n"


async def test_cancelled_cell_closes_the_session(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.cell("import time; time.sleep(30)"), 0.1)
    assert not session.alive


async def test_sessions_are_apart(sandbox: Sandbox) -> None:
    started = time.monotonic()
    sessions = [await sandbox.session() for _ in range(5)]
    await asyncio.gather(*[session.cell(f"x = {n}; open('f', 'w').write('{n}')") for n, session in enumerate(sessions)])
    shown = [(await session.cell("x, open('f').read()")).output for session in sessions]
    assert shown == [f"({n}, '{n}')\n" for n in range(5)]
    for session in sessions:
        await session.close()
    assert time.monotonic() > started


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


async def test_a_syntax_error_shows_the_cell_and_nothing_of_the_harness(sandbox: Sandbox) -> None:
    async with await sandbox.session() as session:
        output = (await session.cell("1 +")).output
    assert "SyntaxError" in output
    assert output.count("File ") == 1
    assert '"<cell 1>"' in output
