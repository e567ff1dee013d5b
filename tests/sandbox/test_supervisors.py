"""A supervisor serves one run after the other; what ends it costs no run anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from gspo_agent.sandbox import Sandbox, SandboxLimits, SandboxSettings
from gspo_agent.sandbox.inside import frames
from tests.sandbox import confinement, remains, survivors

Check = Callable[[Sandbox], Awaitable[None]]
IDS = [check.__name__ for check in remains.CHECKS]


@pytest.mark.parametrize("check", remains.CHECKS, ids=IDS)
async def test_nothing_passes_to_the_next_run(check: Check, sandbox: Sandbox) -> None:
    await check(sandbox)


@pytest.mark.parametrize("check", remains.CHECKS, ids=IDS)
async def test_nothing_passes_to_the_next_run_in_a_container(check: Check, contained: Sandbox) -> None:
    await check(contained)


@pytest.fixture(scope="module", params=["ns", "landlock"])
def own(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox of which nobody else has supervisors."""
    python = "" if request.param == "ns" else confinement.interpreter()
    if python is None:
        pytest.skip("no interpreter that every user may run")
    sandbox = Sandbox(SandboxSettings(request.param, python), max_running=4)
    yield sandbox
    below = survivors.descendants(sandbox.server().pid)
    sandbox.close_now()
    assert not survivors.alive(below)


async def waiting_for_the_next(sandbox: Sandbox) -> int:
    """The supervisor that will have it."""
    named = (await remains.in_turn(sandbox, remains.NAMED, remains.NAMED))[1].stderr.decode()
    names = {
        f"{os.readlink(f'/proc/{pid}/ns/pid')} {1 if sandbox.backend == 'ns' else pid}": pid
        for pid in survivors.supervisors(sandbox.server())
    }
    return names[named]


async def test_run_whose_supervisor_was_killed_while_it_waited_is_tried_once_on_a_new_one(own: Sandbox) -> None:
    await own.run("1")
    waiting = survivors.supervisors(own.server())
    assert waiting
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
    assert not survivors.alive(waiting)
    results = await own.run_many("import os; print(input())", ["1", "2"])
    assert [result.stdout for result in results] == [b"1\n", b"2\n"]


async def test_request_to_a_supervisor_that_is_just_ending_is_no_try(
    own: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been stopped, so that it takes the request, and is killed then. Nor is it one when the new one is lost."""
    await own.run("1")
    monkeypatch.setattr("gspo_agent.sandbox.sandbox._ATTEMPTS", 1)
    for pid in survivors.supervisors(own.server()):
        os.kill(pid, signal.SIGSTOP)
    running = asyncio.create_task(own.run("print(2)"))
    await asyncio.sleep(0.1)
    assert not running.done()
    for pid in survivors.supervisors(own.server()):
        os.kill(pid, signal.SIGKILL)
    assert (await running).stdout == b"2\n"


async def test_more_than_run_at_once_do_not_wait(own: Sandbox) -> None:
    results = await asyncio.gather(*[own.run("print(input())", stdin=str(n)) for n in range(40)])
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(40)]
    assert len(survivors.supervisors(own.server())) <= 4
    assert not own.server().busy


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("import os; os._exit(7)", SandboxLimits()),
        ("import os; os.kill(os.getpid(), 11)", SandboxLimits()),
        ("import time; time.sleep(9)", SandboxLimits(wall_s=0.2)),
        ("import time; time.sleep(0.2)", SandboxLimits()),
        ("print('x' * 9999)", SandboxLimits(output_bytes=5000)),
        ("x = bytearray(1 << 40)", SandboxLimits()),
    ],
    ids=["exit code", "signal", "limit", "looked after", "output", "memory"],
)
async def test_supervisor_ends_with_a_run_that_could_tell_it_more_than_how_it_ended(
    code: str, limits: SandboxLimits, own: Sandbox
) -> None:
    supervisor = await waiting_for_the_next(own)
    await own.run(code, limits=limits)
    assert not survivors.alive({supervisor})


async def test_supervisor_ends_with_a_run_that_is_cancelled_or_not_wanted_any_more(own: Sandbox) -> None:
    for wait in (_cancelled, _stopped):
        supervisor = await waiting_for_the_next(own)
        await wait(own)
        assert not survivors.alive({supervisor})


async def _cancelled(own: Sandbox) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(own.run("import time; time.sleep(9)"), 0.1)


async def _stopped(own: Sandbox) -> None:
    assert len(await own.run_many("print(1)", ["", "", ""], stop=lambda result: True)) == 1


async def test_server_that_was_started_again_has_supervisors_of_its_own() -> None:
    async with Sandbox() as own:
        await own.run("1")
        os.kill(survivors.server_of(own.server()), signal.SIGKILL)
        assert (await own.run("print(1)")).stdout == b"1\n"
        assert (await own.run("print(2)")).stdout == b"2\n"
        assert len(survivors.supervisors(own.server())) == 1


async def test_loops_in_turn_share_what_waits(own: Sandbox) -> None:
    def run() -> set[int]:
        assert asyncio.run(own.run("print(1)")).stdout == b"1\n"
        return survivors.supervisors(own.server())

    assert await asyncio.to_thread(run) == await asyncio.to_thread(run)


@pytest.mark.slow
async def test_supervisor_that_nobody_needs_ends(own: Sandbox) -> None:
    await own.run("1")
    waiting = survivors.supervisors(own.server())
    assert waiting
    await asyncio.sleep(frames.IDLE_S + 1)
    assert not survivors.supervisors(own.server())
    assert (await own.run("print(1)")).stdout == b"1\n"
