"""What isolation costs: `python -m tests.benchmarks.sandbox [BACKEND [INTERPRETER]]`, beside `python -I -S` in the same
run.

CPU is that of this process and of everything inside the sandbox, without the start of the fork server.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gspo_agent.sandbox import Sandbox, SandboxSettings
from tests.sandbox import survivors

CODE = "print(input()[::-1])"
SETTINGS = SandboxSettings(*sys.argv[1:])  # type: ignore[arg-type]
ADD = "def add(a, b): return a + b"


async def isolated_runs(sandbox: Sandbox, count: int) -> None:
    results = await asyncio.gather(*[sandbox.run(CODE, stdin="abc") for _ in range(count)])
    assert all(result.stdout == b"cba\n" for result in results)


async def batched_runs(sandbox: Sandbox, count: int) -> None:
    for _ in range(count // 20):
        results = await sandbox.run_many(CODE, ["abc"] * 20)
        assert all(result.stdout == b"cba\n" for result in results)


async def batched_calls(sandbox: Sandbox, count: int) -> None:
    for n in range(count // 20):
        results = await sandbox.call_many(ADD, "add", [[n, 1]] * 20)
        assert all(result.value == n + 1 for result in results)


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


async def bare_interpreters(sandbox: Sandbox, count: int) -> None:
    for _ in range(count):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", CODE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert (await process.communicate(b"abc"))[0] == b"cba\n"


async def measure(name: str, count: int, work: Callable[[Sandbox, int], Awaitable[None]]) -> None:
    async with Sandbox(SETTINGS) as sandbox:
        testing = work is test_files
        server = (sandbox.testing_server() if testing else sandbox.server()).pid
        await asyncio.sleep(0.1)  # until the probes are reaped, and below the jobs: their CPU then counts
        started, cpu = time.perf_counter(), _cpu(server)
        await work(sandbox, count)
        wall = time.perf_counter() - started
        await asyncio.sleep(0.1)
        cpu = _cpu(server) - cpu
    print(f"{name:24} {count:6} times  {1000 * wall / count:8.3f} ms wall  {1000 * cpu / count:8.3f} ms CPU each")


async def memory(count: int) -> None:
    async with Sandbox(SETTINGS) as sandbox:
        before = _shared_out(survivors.descendants(sandbox.server().pid))
        opened = [await sandbox.session() for _ in range(count)]
        after = _shared_out(survivors.descendants(sandbox.server().pid))
        for session in opened:
            await session.close()
    print(f"{'idle session':24} {count:6} open   {(after - before) / count / 1024:8.2f} MB each (PSS)")


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


async def main() -> None:
    await measure("isolated run", 200, isolated_runs)
    await measure("run in a batch of 20", 400, batched_runs)
    await measure("call in a batch of 20", 2000, batched_calls)
    await measure("test file of two tests", 20, test_files)
    await measure("session, open to close", 100, sessions)
    await measure("cell", 2000, cells)
    await measure("python -I -S, unconfined", 50, bare_interpreters)
    await memory(50)


if __name__ == "__main__":
    asyncio.run(main())
