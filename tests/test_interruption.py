"""A signal cuts the task, a second one ends the process, and so does a goodbye that takes too long."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gspo_agent.interruption import CUT, Interruption

SCRIPT = """
import asyncio, contextlib, sys, time
from gspo_agent.interruption import Interruption

async def work():
    try:
        print("working", flush=True)
        {work}
    finally:
        with contextlib.suppress(OSError):
            print("leaving", flush=True)
        {leave}

Interruption({grace}, "goodbye").run(work())
"""


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """A closed terminal ends what is started here, also where the tests themselves were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(work: str, leave: str = "pass", grace: float = 0.0) -> subprocess.Popen[str]:
    script = SCRIPT.format(work=work, leave=leave, grace=grace)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    out, errors = process.stdout.read(), process.stderr.read()
    return process.wait(30), out, errors


async def test_a_signal_cancels_the_task_and_only_sigint_gives_tools_no_time() -> None:
    for number, least, most in ((signal.SIGINT, 0, 0), (signal.SIGTERM, 50, 60), (signal.SIGHUP, 50, 60)):
        interruption = Interruption(grace=60.0)
        before = signal.getsignal(number)
        task = asyncio.create_task(asyncio.sleep(3600))
        interruption.watch(task)
        try:
            assert interruption.grace == 0.0
            os.kill(os.getpid(), number)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert least <= interruption.grace <= most
        finally:
            interruption.release()
        assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_cut_ends_with_its_status_and_its_line(number: int) -> None:
    with start("await asyncio.sleep(3600)") as process:
        process.send_signal(number)
        assert end(process) == (CUT, "leaving\n", "goodbye\n")


@pytest.mark.parametrize("leave", ["await asyncio.sleep(3600)", "time.sleep(3600)"])
def test_a_second_signal_ends_the_process_at_once(leave: str) -> None:
    """Also where what is left to do keeps the event loop busy; the grace would allow an hour."""
    with start("await asyncio.sleep(3600)", leave, grace=3600.0) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(signal.SIGTERM)
        assert end(process) == (CUT, "", "goodbye\n")


@pytest.mark.parametrize(
    ("work", "leave"), [("await asyncio.sleep(3600)", "await asyncio.sleep(3600)"), ("time.sleep(3600)", "pass")]
)
def test_a_goodbye_that_hangs_is_ended_when_its_time_is_over(work: str, leave: str) -> None:
    """As is one that cannot begin, because the event loop hears nothing."""
    with start(work, leave, grace=0.3) as process:
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert end(process)[::2] == (CUT, "goodbye\n")
        assert time.monotonic() - began > 0.3


@pytest.mark.parametrize(("leave", "number"), [("pass", signal.SIGINT), ("time.sleep(3600)", signal.SIGHUP)])
def test_a_cut_ends_also_where_nobody_reads_any_more(leave: str, number: int) -> None:
    """Ctrl-C ends the other programs of a pipe too, and a closed terminal takes no goodbye."""
    with start("await asyncio.sleep(3600)", leave) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        process.send_signal(number)
        assert process.wait(30) == CUT


def test_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("await asyncio.sleep(3600)")
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)  # the first that cuts; a second one would end it before it leaves
        assert end(process) == (CUT, "leaving\n", "goodbye\n")


def test_work_that_ends_by_itself_leaves_nothing_behind() -> None:
    with start("await asyncio.sleep(0)") as process:
        assert end(process) == (0, "leaving\n", "")
