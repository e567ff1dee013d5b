from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo_agent.sandbox import Sandbox
from gspo_agent.sandbox.forkserver import ForkServer
from tests.sandbox import survivors

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
# A process that may make no namespace and mount nothing, as in a container's default confinement.
REFUSED = """
from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import Sandbox
from gspo_agent.sandbox.inside.seccomp import Filter

Filter().install()
try:
    Sandbox().server()
except SandboxError as error:
    print(error)
"""


async def test_nothing_is_left_after_jobs_sessions_and_closing() -> None:
    before = survivors.traces()
    sandbox = Sandbox()
    below = survivors.descendants(sandbox.server().pid)
    result = await sandbox.run(DAEMON)
    assert result.stdout == b"left\n"
    # With the result, every process of the run is gone, the daemon as well.
    assert not survivors.alive(survivors.descendants(sandbox.server().pid) - below)
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
    server = ForkServer()
    channel = server.spawn()
    time.sleep(0.1)
    below = survivors.descendants(server.pid)
    victim = sorted(below)[depth]
    os.kill(victim, signal.SIGKILL)
    server._process.wait(10)
    assert not server.alive
    assert not survivors.alive(below)
    channel.close()
    with pytest.raises(OSError, match="Broken pipe"):
        server.spawn()
    server.close()


def test_machine_without_namespaces_is_refused_with_the_step_and_the_remedy() -> None:
    said = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "no isolation on this machine" in said
    assert "unshare" in said
    assert "Remedy:" in said


def test_server_is_in_namespaces_of_its_own() -> None:
    server = ForkServer()
    try:
        _, _, inner = sorted(survivors.descendants(server.pid))[:3]  # launcher, outer, server
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            ours, theirs = (os.readlink(f"/proc/{pid}/ns/{kind}") for pid in ("self", inner))
            assert ours != theirs, kind
        assert Path(f"/proc/{inner}/environ").read_bytes().count(b"\0") <= 4
    finally:
        server.close()
