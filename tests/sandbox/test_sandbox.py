from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable

import pytest

from gspo_agent.clock import Clock
from gspo_agent.errors import ConfigError, SandboxError
from gspo_agent.sandbox import Sandbox, SandboxLimits, SandboxSettings, marks, share, shared_sandbox
from gspo_agent.waiting import told
from tests.sandbox import survivors

SLEEP = "import time; time.sleep(60)"


async def test_program_gets_its_input_and_gives_its_streams(sandbox: Sandbox) -> None:
    code = "import sys\nprint(sys.stdin.read()[::-1])\nprint('bad', file=sys.stderr)\nsys.exit(3)"
    result = await sandbox.run(code, stdin="abc")
    assert (result.stdout, result.stderr) == (b"cba\n", b"bad\n")
    assert (result.status, result.exit_code) == ("runtime_error", 3)
    assert result.cpu_s > 0
    assert result.wall_s > 0


async def test_traceback_shows_the_code_and_no_harness(sandbox: Sandbox) -> None:
    result = await sandbox.run("def f():\n    return 1 / 0\nf()")
    assert result.stderr.decode() == (
        "Traceback (most recent call last):\n"
        '  File "main.py", line 3, in <module>\n    f()\n'
        '  File "main.py", line 2, in f\n    return 1 / 0\n'
        "ZeroDivisionError: division by zero\n"
    )
    assert (result.status, result.exit_code) == ("runtime_error", 1)


async def test_syntax_error_is_told_apart(sandbox: Sandbox) -> None:
    assert (await sandbox.run("def f(:")).status == "compile_error"


async def test_program_behaves_as_under_a_plain_interpreter(sandbox: Sandbox) -> None:
    code = """
import atexit, os, sys, tempfile, subprocess, random
atexit.register(print, "at exit")
assert __name__ == "__main__" and sys.argv == ["main.py"]
assert open("/dev/stdin").read() == "in"
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("x")
open("own.py", "w").write("value = 7")
import own
child = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True)
print(own.value, os.getcwd(), child.stdout.strip(), child.stderr)
"""
    result = await sandbox.run(code, stdin="in")
    assert result.stdout.decode() == "7 /box/work 42 \nat exit\n", result.stderr.decode()


async def test_kernel_without_memory_ends_programs_first(sandbox: Sandbox) -> None:
    result = await sandbox.run("print(open('/proc/self/oom_score_adj').read())")
    assert result.stdout == b"1000\n\n"


async def test_runs_of_a_batch_share_nothing(sandbox: Sandbox) -> None:
    code = "import os, builtins\nprint(os.listdir('.'), hasattr(builtins, 'x'))\nopen('f','w').close(); builtins.x = 1"
    results = await sandbox.run_many(code, ["", "", ""])
    assert [result.stdout for result in results] == [b"[] False\n"] * 3


async def test_every_run_of_a_batch_is_as_it_would_be_alone(sandbox: Sandbox) -> None:
    code = """
import dataclasses, inspect, pickle, sys
@dataclasses.dataclass
class Point:
    'text'
    x: int = 1_000_000
def f(a, *, b: int = 1_000_000) -> "str":
    return Point().x is b, 1 / a
print(pickle.loads(pickle.dumps(Point(4))), Point.__module__, Point.__doc__, inspect.signature(f), f.__code__)
print(__name__, __file__, sorted(globals()), sys._getframe().f_code.co_name, f(1), input())
"""
    code = code.replace("f.__code__", "f.__code__.co_filename, f.__code__.co_firstlineno")
    for more in (
        "f(0)",
        "assert (1, 'always')\nif input is 1: pass\nf(0)",
        "def (",
        "raise SystemExit(3)",
        "x = '\\d'",
    ):
        alone = [await sandbox.run(code + more, stdin=text) for text in "abc"]
        batch = await sandbox.run_many(code + more, list("abc"))
        assert [(r.stdout, r.stderr, r.status, r.exit_code) for r in batch] == [
            (r.stdout, r.stderr, r.status, r.exit_code) for r in alone
        ]
    assert b"SyntaxWarning" in (await sandbox.run_many("assert (1, '')", ["", ""]))[1].stderr


async def test_code_whose_first_run_ends_in_the_compiler_or_is_too_large_to_be_kept(sandbox: Sandbox) -> None:
    for code, limits in (
        ("x = " + "(" * 5000, SandboxLimits()),
        ("text = '" + "y" * 50_000 + "'\nprint(len(text))", SandboxLimits(output_bytes=40_000)),
        ("x = " + "-" * 300_000 + "1", SandboxLimits(cpu_s=0.01, wall_s=5)),
    ):
        alone = await sandbox.run(code, limits=limits)
        for result in await sandbox.run_many(code, [""] * 2, limits=limits):
            assert (result.stdout, result.stderr, result.status) == (alone.stdout, alone.stderr, alone.status)


async def test_batch_stops_when_told(sandbox: Sandbox) -> None:
    results = await sandbox.run_many("print(input())", ["1", "2", "3"], stop=lambda result: result.stdout == b"2\n")
    assert [result.stdout for result in results] == [b"1\n", b"2\n"]


async def test_large_inputs_and_outputs_pass_whole(sandbox: Sandbox) -> None:
    text = "x" * 3_000_000
    result = await sandbox.run("print(input())", stdin=text)
    assert result.stdout.decode() == text + "\n"
    (call,) = await sandbox.call_many("def f(s): return s[::-1]", "f", [[text]])
    assert call.value == text


async def test_wall_limit_ends_a_program_that_only_waits(sandbox: Sandbox) -> None:
    result = await sandbox.run(SLEEP, limits=SandboxLimits(wall_s=0.2))
    assert result.status == "time_limit"
    assert result.cpu_s < 1


async def test_memory_of_all_processes_counts(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = bytearray(60_000_000)\ntime.sleep(30)"
    )
    assert (await sandbox.run(code, limits=SandboxLimits(memory_bytes=150 << 20))).status == "memory_limit"


async def test_disk_is_limited_and_in_memory_only(sandbox: Sandbox) -> None:
    code = "for i in range(9):\n    open(str(i), 'wb').write(bytes(1 << 20))"
    result = await sandbox.run(code, limits=SandboxLimits(disk_bytes=4 << 20))
    assert b"No space left" in result.stderr
    result = await sandbox.run("for i in range(99): open(str(i), 'w')", limits=SandboxLimits(files=20))
    assert b"No space left" in result.stderr


async def test_cancelled_run_ends_its_processes() -> None:
    async with Sandbox() as own:
        task = asyncio.create_task(own.run(SLEEP))
        before = survivors.descendants(own.server().pid)
        await _until(lambda: len(survivors.descendants(own.server().pid) - before) == 2)
        running = survivors.descendants(own.server().pid) - before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not survivors.alive(running)
        assert (await own.run("print(1)")).stdout == b"1\n"


async def test_job_lost_with_the_fork_server_is_run_again() -> None:
    async with Sandbox() as own:
        first = own.server()
        task = asyncio.create_task(own.run("import time; time.sleep(0.3); print('done')"))
        await _until(lambda: len(survivors.descendants(first.pid)) >= 5)
        below = survivors.descendants(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        result = await task
        assert (result.status, result.stdout) == ("ok", b"done\n")
        assert own.server() is not first
        assert not survivors.alive(below)


@pytest.mark.slow
async def test_servers_killed_at_random_moments_never_change_an_answer() -> None:
    async with Sandbox(max_running=4) as own:
        own.server()

        async def kill() -> None:
            for n in range(6):
                await asyncio.sleep(0.05 + 0.03 * n)
                os.kill(survivors.chain(own.server())[n % 3], signal.SIGKILL)

        runs = [own.run("print(input())", stdin=str(n)) for n in range(60)]
        calls = [own.call_many("def f(x): return x + 1", "f", [[n], [n + 1]]) for n in range(60)]
        _, run_results, call_results = await asyncio.gather(kill(), asyncio.gather(*runs), asyncio.gather(*calls))
        after = await own.run("print('clean')")
    lost = 0
    for n, (result, answers) in enumerate(zip(run_results, call_results, strict=True)):
        lost += result.status == "infra_error"
        assert result.status == "infra_error" or (result.status, result.stdout) == ("ok", b"%d\n" % n)
        for position, answer in enumerate(answers):
            assert answer.status == "infra_error" or (answer.status, answer.value) == ("ok", n + position + 1)
    assert lost < 30
    assert after.stdout == b"clean\n"


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for happens in other processes
        await asyncio.sleep(0.01)


async def test_many_jobs_at_once_wait_for_their_turn_and_none_is_mixed_up() -> None:
    async with Sandbox(max_running=2) as own:
        results = await asyncio.gather(*[own.run("print(input())", stdin=str(n)) for n in range(40)])
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(40)]


async def test_waiting_for_a_turn_is_no_time_of_the_episode() -> None:
    clock = Clock()
    async with Sandbox(max_running=1) as own:
        before = asyncio.create_task(own.run("import time; time.sleep(0.6)"))
        await asyncio.sleep(0.1)
        with told(lambda what: clock.stop(), clock.go):
            begun = clock.now()
            assert (await own.run("print(1)", limits=SandboxLimits(wall_s=0.2))).stdout == b"1\n"
        assert clock.now() - begun < 0.4
        assert before.done()


@pytest.mark.parametrize("target", ["0", "-1", "1", "os.getppid()"])
async def test_signals_reach_only_the_programs_own_processes(target: str, sandbox: Sandbox) -> None:
    server = sandbox.server()
    for name in ("SIGINT", "SIGTERM", "SIGKILL"):
        await sandbox.run(f"import os, signal\nos.kill({target}, signal.{name})")
    results = await sandbox.run_many(f"import os\nos.kill({target}, 9)", [""] * 2)

    assert sandbox.server() is server
    assert server.alive
    assert all(result.status != "infra_error" for result in results)


async def test_installed_packages_of_the_interpreter_are_hidden(sandbox: Sandbox) -> None:
    code = "import os, json\nlibrary = os.path.dirname(os.__file__)\nprint(os.listdir(library + '/site-packages'))"
    assert (await sandbox.run(code)).stdout in (b"[]\n", b"")


async def test_argument_that_is_no_data_is_refused_before_anything_runs(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="object is not plain data"):
        await sandbox.call_many("def f(x): return x", "f", [[object()]])


async def test_closed_sandbox_and_unknown_backend_are_refused() -> None:
    own = Sandbox()
    await own.close()
    with pytest.raises(SandboxError, match="closed"):
        await own.run("1")
    with pytest.raises(ConfigError, match="'docker'; known are auto, ns, landlock"):
        SandboxSettings("docker")  # type: ignore[arg-type]
    for seconds in (0, float("nan"), float("inf"), 1e300):
        with pytest.raises(ConfigError, match=f"cpu_s = {re.escape(repr(seconds))} is not above 0"):
            SandboxLimits(cpu_s=seconds)


async def test_shared_sandbox_is_one_and_comes_back_after_closing() -> None:
    first = shared_sandbox()
    assert shared_sandbox() is first
    await first.close()
    second = shared_sandbox()
    assert second is not first
    await second.close()


async def test_unsafe_runs_only_when_asked_for_says_so_and_marks_every_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert marks() == {}
    share(SandboxSettings("unsafe"))
    try:
        assert marks() == {"unsafe_sandbox": 1.0}
        own = shared_sandbox()
        assert own.server().backend == "unsafe"
        assert "runs unconfined" in caplog.text
        escape = (
            "import os\nopen('x', 'w')\nif os.fork() == 0:\n    import time; time.sleep(60)\nprint(os.listdir('.'))"
        )
        results = await own.run_many(escape, ["", ""])
        assert [result.stdout for result in results] == [b"['x']\n"] * 2
        assert not survivors.alive(survivors.programs(own.server()))
    finally:
        share(SandboxSettings())
    assert marks() == {}
    assert own._closed
