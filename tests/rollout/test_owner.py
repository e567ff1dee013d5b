"""Alive, stopped, died or silent: told by the lock where it reaches, by the heartbeat where it does not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from gspo_agent.rollout import lock
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.owner import Owner
from gspo_agent.rollout.status import read_status

HOLD = "import sys, time; from gspo_agent.rollout.journal import Journal; from pathlib import Path\n"
HOLD += "journal = Journal.open(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"


def owner(host: str, age: float, ended: bool = False) -> Owner:
    return Owner(1, host, os.getpid(), time.time() - age, ended)


def test_a_run_of_this_process_is_running_and_stopped_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal.open(path) as journal:
        assert read_status(path).alive
        journal.submit(lambda c: c.execute("UPDATE lease SET heartbeat = 0")).result(5)
        journal.submit(lambda c: c.execute("UPDATE lives SET began = 0")).result(5)
        assert read_status(path).state == "silent"
        # To look at the lock does not drop it: POSIX locks go with any descriptor of their file.
        assert subprocess.run([sys.executable, "-c", HOLD, path], capture_output=True, check=False).returncode == 1
    assert read_status(path).state == "stopped"


def test_a_killed_process_has_died_at_once_however_fresh_its_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_status(path).state == "running"
        os.kill(process.pid, signal.SIGSTOP)
        assert read_status(path).state == "running"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert read_status(path).state == "died"


def test_where_no_lock_is_seen_another_hosts_heartbeat_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    here = socket.gethostname()
    for host, age, ended, state in (
        (here, 0, False, "died"),
        (here, 0, True, "stopped"),
        ("elsewhere", 0, False, "running"),
        ("elsewhere", lock.EXPIRY + 1, False, "silent"),
        ("elsewhere", lock.EXPIRY + 1, True, "stopped"),
    ):
        assert owner(host, age, ended).state(path) == state
