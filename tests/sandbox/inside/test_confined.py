"""The backend `landlock` as a container's root and as an ordinary user get it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import Sandbox, SandboxLimits, SandboxSettings, probe
from gspo_agent.sandbox.inside import confined, landlock
from tests.sandbox import cases, confinement, survivors
from tests.sandbox.test_session import check

TIGHT = SandboxLimits(cpu_s=2, wall_s=3, memory_bytes=128 << 20, disk_bytes=8 << 20, files=100)


async def test_containers_get_landlock_and_root_an_id_for_each_job(contained: Sandbox) -> None:
    server = contained.server()
    assert server.backend == "landlock"
    results = await asyncio.gather(*[contained.run("import os, time; time.sleep(.1); print(os.getuid())")] * 1)
    (uid,) = {int(result.stdout) for result in results}
    assert (uid > 1 << 16) == server.own_uids


async def test_program_behaves_as_under_a_plain_interpreter_but_for_processes(contained: Sandbox) -> None:
    code = """
import atexit, decimal, os, random, sys, tempfile, threading, time, zoneinfo, ctypes, socket, shutil, signal
atexit.register(print, "at exit")
assert __name__ == "__main__" and sys.argv == ["main.py"]
assert open("/dev/stdin").read() == "in"
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("x")
os.mkdir("d"); os.rename("d", "e"); open("e/f", "w").write("1"); os.link("e/f", "g"); os.symlink("g", "h")
os.truncate(os.open("g", os.O_RDWR), 0); shutil.rmtree("e")
open("own.py", "w").write("value = 7")
import own
pair = socket.socketpair(); pair[0].send(b"x")
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
open("/dev/null", "w").write("x")
print(own.value, os.path.basename(os.getcwd()), zoneinfo.ZoneInfo("Europe/Paris"))
try: os.fork()
except PermissionError: print("no fork")
"""
    result = await contained.run(code, stdin="in")
    assert result.stdout.decode() == "heard\nheard\nthread\n7 work Europe/Paris\nno fork\nat exit\n", result.stderr


async def test_nothing_gets_out_of_a_contained_job(contained: Sandbox) -> None:
    code, stdin, limits = probe.program(canary="/etc/passwd")
    result = await contained.run(code.decode(), stdin=stdin, limits=limits)
    assert (result.status, json.loads(result.stdout)) == ("ok", [])


async def test_probes_notice_what_is_readable(contained: Sandbox) -> None:
    code, _, _ = probe.program()
    asked = json.dumps({"secrets": ["/dev/zero", "/etc/shadow"], "canary": "own"})
    result = await contained.run(
        "open('own', 'w').write('x')\n" + code.decode().split("annotations", 1)[1], stdin=asked
    )
    found = set(json.loads(result.stdout))
    assert {"/dev/zero is readable", "a file was cut off", "a file was moved"} <= found
    assert "/etc/shadow is readable" not in found


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases.of_kind("session")])
async def test_session_case_in_a_container(case: dict[str, Any], contained: Sandbox) -> None:
    await check(case, contained)


async def test_idle_session_stands_still_in_a_container(contained: Sandbox) -> None:
    async with await contained.session() as session:
        spin = "import threading, time\nn = 0\ndef spin():\n    global n\n    while True: time.sleep(0.001); n += 1\n"
        await session.cell(spin + "threading.Thread(target=spin, daemon=True).start()")
        await asyncio.sleep(0.5)
        assert int((await session.cell("n")).output) < 250


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("a = []\nwhile True: a.append(bytearray(b'x' * 50_000_000))", "memory_limit"),
        ("for n in range(3): open(str(n), 'wb').write(bytes(4 << 20))\nimport time; time.sleep(9)", "runtime_error"),
        ("for n in range(110): open(str(n), 'w')\nimport time; time.sleep(9)", "runtime_error"),
        ("import os\nfor n in range(3): open('x', 'w'); os.remove('x')\n[os.mkdir(f'd{n}') for n in range(9)]", "ok"),
        ("import time\ntime.sleep(60)", "time_limit"),
    ],
    ids=["memory", "disk", "files", "fair", "wall"],
)
async def test_limits_hold_without_the_kernels_quotas(code: str, status: str, contained: Sandbox) -> None:
    assert (await contained.run(code, limits=TIGHT)).status == status


async def test_threads_are_limited_with_and_without_an_id_of_their_own(contained: Sandbox) -> None:
    code = """
import threading, time
threading.stack_size(1 << 16)
made = 0
try:
    for made in range(200): threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
except RuntimeError: print("refused")
time.sleep(1)
"""
    result = await contained.run(code, limits=TIGHT)
    refused = contained.server().own_uids
    assert (result.status, result.stdout) == (("ok", b"refused\n") if refused else ("runtime_error", b""))


async def test_runs_of_a_batch_share_nothing_however_deep_and_closed_their_files_are(contained: Sandbox) -> None:
    code = """
import os
print(os.listdir('.'), os.listdir(os.environ["TMPDIR"]))
os.umask(0o777)
for _ in range(300):
    os.mkdir('a' * 100)
    try: os.chdir('a' * 100)
    except PermissionError: break
open(os.environ["TMPDIR"] + "/x", "w").close()
"""
    results = await contained.run_many(code, ["", ""])
    assert [result.stdout for result in results] == [b"[] []\n"] * 2, results[0].stderr


@pytest.mark.parametrize("target", ["0", "-1", "1", "os.getppid()"])
async def test_signals_of_contained_jobs_reach_only_themselves(target: str, contained: Sandbox) -> None:
    server = contained.server()
    for name in ("SIGTERM", "SIGKILL"):
        result = await contained.run(f"import os, signal\nos.kill({target}, signal.{name})")
        assert (result.status, result.exit_code) == ("runtime_error", 1)
    assert server.alive


async def test_descriptor_can_be_told_to_signal_nobody(contained: Sandbox) -> None:
    code = """
import fcntl, os, socket
pair = socket.socketpair()
for call in (lambda: fcntl.fcntl(pair[0], fcntl.F_SETOWN, os.getppid()), lambda: fcntl.fcntl(pair[0], 10, 9),
             lambda: fcntl.ioctl(pair[0], 0x8901, os.getppid().to_bytes(4, "little"))):
    try: print(call())
    except PermissionError: print("refused")
"""
    assert (await contained.run(code)).stdout == b"refused\n" * 3


async def test_job_can_not_outlive_a_killed_supervisor(contained: Sandbox) -> None:
    server = contained.server()
    escape = "import ctypes, time\nprint(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))\ntime.sleep(60)"
    running = asyncio.create_task(contained.run(escape))
    while not (programs := survivors.programs(server)):  # noqa: ASYNC110  # in other processes
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    for pid in survivors.supervisors(server):
        os.kill(pid, signal.SIGKILL)
    assert not survivors.alive(programs)
    running.cancel()


@pytest.mark.parametrize("depth", [0, 1])
def test_end_of_launcher_or_server_is_the_end_of_all(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = confinement.wrapped("restricted", _open(tmp_path))
    if python is None:
        pytest.skip("no interpreter that every user may run")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    server = Sandbox(SandboxSettings("landlock", python)).server()
    channel = server.spawn()
    time.sleep(0.1)
    below = survivors.descendants(server.pid)
    os.kill(survivors.chain(server)[depth], signal.SIGKILL)
    server._process.wait(10)
    assert not survivors.alive(below)
    channel.close()
    server.close()
    assert len(list(scratch.iterdir())) == (depth == 0)  # a killed launcher's is left to the next one


def test_what_a_killed_launcher_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, fresh = tmp_path / "gspo-sandbox-1-left", tmp_path / "gspo-sandbox-2-fresh"
    for path in (left, fresh):
        (path / "3" / "work").mkdir(parents=True)
        (path / "3" / "work" / "file").write_text("x")
    os.utime(left, (1, 1))
    (tmp_path / "gspo-sandbox-link").symlink_to(fresh)
    confined._sweep(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gspo-sandbox-2-fresh", "gspo-sandbox-link"]


def test_private_interpreter_is_refused_with_the_directory_and_the_remedy(tmp_path: Path) -> None:
    path = Path(os.path.realpath(os.__file__))
    if os.getuid() != 0 or os.stat("/root").st_mode & 1 or not path.is_relative_to("/root"):
        pytest.skip("the interpreter is readable for all")
    with pytest.raises(SandboxError, match=r"\(/root is private\).*Remedy: name an interpreter that everyone can read"):
        Sandbox(SandboxSettings("landlock")).server()


def _open(directory: Path) -> Path:
    for path in (directory, *directory.parents):
        if path.owner() and path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    return directory


def test_rules_go_around_installed_packages(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "secret.py").touch()
    (tmp_path / "lib" / "python3" / "os.py").touch()
    (tmp_path / "lib" / "python3" / "json").mkdir()
    (tmp_path / "lib" / "python3" / "link").symlink_to(packages)
    (tmp_path / "lib" / "libc.so").touch()
    rules = dict(confined._around(str(tmp_path / "lib"), [str(packages)]))
    readable = {Path(path).name for path, rights in rules.items() if rights & landlock.READ_FILE}
    listed = {Path(path).name for path, rights in rules.items() if rights == landlock.READ_DIR}
    assert readable == {"libc.so", "os.py", "json"}
    assert listed == {"lib", "python3"}


def test_what_a_killed_server_had_just_forked_ends_with_the_launcher() -> None:
    """It had not asked yet to end with its parent, and belongs to the launcher now."""
    code = (
        "import os, time\n"
        "from gspo_agent.sandbox.inside import descendants, linux\n"
        "linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)\n"
        "server = os.fork()\n"
        "if not server:\n"
        "    if not os.fork(): time.sleep(100)\n"
        "    os._exit(0)\n"
        "descendants.end_all()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=confinement.ROOT, timeout=10, check=True)
