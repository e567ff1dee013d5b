from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gspo_agent import mounts
from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import Sandbox
from gspo_agent.sandbox.forkserver import ForkServer
from gspo_agent.sandbox.settings import SandboxSettings
from tests.sandbox import confinement, survivors

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("left")
"""
TRAINER = """
import asyncio
from gspo_agent.sandbox import Sandbox

async def main():
    sandbox = Sandbox()
    session = await sandbox.session()
    await session.cell("import os, time\\nif os.fork() == 0: time.sleep(60)")
    print(sandbox.server().pid, flush=True)
    await sandbox.run("import time; time.sleep(60)")

asyncio.run(main())
"""


async def test_nothing_is_left_after_jobs_sessions_and_closing() -> None:
    before = survivors.traces()
    sandbox = Sandbox()
    result = await sandbox.run(DAEMON)
    assert result.stdout == b"left\n"
    # With the result, every process of the run is gone, the daemon as well.
    assert not survivors.alive(survivors.programs(sandbox.server()))
    session = await sandbox.session()
    await session.cell("import os, time\nif os.fork() == 0: time.sleep(60)")
    below = survivors.descendants(sandbox.server().pid)
    assert len(below) >= 6
    await sandbox.close()
    assert not survivors.alive(below)
    await session.close()
    assert survivors.traces() == before


def test_killed_trainer_leaves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        server = int(trainer.stdout.readline())
        below = survivors.descendants(server)
        assert len(below) >= 6
        os.kill(trainer.pid, signal.SIGKILL)
    assert not survivors.alive(below)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_end_of_any_part_of_the_server_is_the_end_of_all(depth: int) -> None:
    server = ForkServer(SandboxSettings("ns"))
    channel = server.spawn()
    time.sleep(0.1)
    below = survivors.descendants(server.pid)
    os.kill(survivors.chain(server)[depth], signal.SIGKILL)
    server._process.wait(10)
    assert not server.alive
    assert not survivors.alive(below)
    channel.close()
    with pytest.raises(OSError, match="Broken pipe"):
        server.spawn()
    server.close()


def test_machine_without_any_isolation_is_refused_with_the_steps_and_the_remedies(tmp_path: Path) -> None:
    python = confinement.wrapped("old", tmp_path)
    if python is None:
        pytest.skip("no interpreter that every user may run")
    said = (
        r"by ns or landlock: ns: .* unshare.*; landlock: .*landlock: Function not implemented.*Remedy: for ns: .*lsm="
    )
    with pytest.raises(SandboxError, match=said):
        Sandbox(SandboxSettings(python=python)).server()


@pytest.mark.parametrize(
    ("program", "said"),
    [("", "cannot be run: Permission denied"), ("#!/bin/sh\nexit 3", "did not start: it ended with status 3")],
)
def test_interpreter_that_is_none_is_named_with_the_remedy(program: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(program)
    (tmp_path / "python").chmod(0o755 if program else 0o644)
    with pytest.raises(SandboxError, match=rf"by ns: .*{said}.*Remedy: name a Python 3\.11 or newer"):
        Sandbox(SandboxSettings("ns", str(tmp_path / "python"))).server()


def test_choice_is_kept_when_the_server_has_to_be_started_again() -> None:
    own = Sandbox()
    assert own.server().backend == "ns"
    own.server().close()
    assert own._settings.backend == "ns"
    assert own.server().backend == "ns"
    own.close_now()


def test_server_is_in_namespaces_of_its_own() -> None:
    server = ForkServer(SandboxSettings("ns"))
    try:
        inner = survivors.server_of(server)
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            ours, theirs = (os.readlink(f"/proc/{pid}/ns/{kind}") for pid in ("self", inner))
            assert ours != theirs, kind
        assert Path(f"/proc/{inner}/environ").read_bytes().count(b"\0") <= 4
    finally:
        server.close()


def test_work_directory_on_a_network_file_system_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounts").write_text(f"/dev/vda / ext4 rw 0 0\nhost:/x {tempfile.gettempdir()} nfs4 rw 0 0\n")
    monkeypatch.setattr(mounts, "TABLE", tmp_path / "mounts")
    with pytest.raises(SandboxError, match=r"by landlock: .* is on a network file system.*Remedy: set TMPDIR to"):
        ForkServer(SandboxSettings("landlock"))
    ForkServer(SandboxSettings("ns")).close()  # has no file on the host


def test_too_many_open_files_are_an_error_by_name_and_no_death_of_the_server(sandbox: Sandbox) -> None:
    server = sandbox.server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(SandboxError, match=r"no job can be started: Too many open files.*ulimit -n"):
            sandbox.channel()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sandbox.channel().close()
    assert sandbox.server() is server


CROWDED = """
import os, select, socket
from gspo_agent.sandbox.inside.forkserver import _serve

class Walls:
    slots, import_paths, shell, canary = 1, [], False, None
    fork = staticmethod(os.fork)
    enclosure = staticmethod(lambda slot: None)
    forget = staticmethod(lambda pid: None)

control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    control.close()
    _serve(far, Walls())
far.close()
control.recv(4096)
channels = []
for _ in range(2):
    near, end = socket.socketpair()
    socket.send_fds(control, [b"job"], [end.fileno()])
    end.close()
    channels.append(near)
print(channels[1].recv(1))
if not select.select([channels[0]], [], [], 0.2)[0]:
    print("waits for its request")
"""


def test_job_for_which_no_user_id_is_left_is_lost_and_no_other() -> None:
    ended = subprocess.run([sys.executable, "-c", CROWDED], cwd=confinement.ROOT, capture_output=True, text=True)
    assert ended.stdout == "b''\nwaits for its request\n", ended.stderr
