"""kill -9 at random moments of a real `gspo-agent train CONFIG`, each time followed by the same command; an audit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gspo_agent.config import Config
from gspo_agent.rollout.audit import audit
from gspo_agent.run import Run


@dataclass(frozen=True, slots=True)
class Kill:
    after: float
    """Seconds since the start of the process."""
    step: int
    """The last committed step at the moment of the kill."""
    groups: str
    survivors: int
    """Processes of the killed one's session that were still there a second later."""


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def members(session: int) -> list[int]:
    """Living processes of a session, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def state_of(run: Run) -> tuple[int, str]:
    if not run.journal.exists():
        return 0, "no journal yet"
    status = run.status()
    return status.step, ", ".join(f"{n} {state}" for state, n in status.groups.items())


def kill_training(config: list[str], kills: int, seed: int, least: float, most: float) -> int:
    """The exit status of the campaign: 1 on any loss. `least` and `most` are seconds before a kill."""
    loaded = Config.load(config[0], config[1:])
    run, draw = Run(loaded.run.dir), random.Random(seed)
    log = run.dir.with_name(run.dir.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gspo_agent.cli", "train", *config]
    table: list[Kill] = []
    while len(table) < kills:
        process, after = start(command, log), draw.uniform(least, most)
        try:
            code = process.wait(timeout=after)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the trainer alone: what it started must end by itself
            process.wait()
        else:
            print(f"the run ended by itself with status {code} after {len(table)} kills; give it more steps")
            return 1
        time.sleep(1.0)
        table.append(Kill(after, *state_of(run), survivors=len(members(process.pid))))
        print(f"kill {len(table)}/{kills}: after {after:.1f} s at step {table[-1].step}", flush=True)
    code = start(command, log).wait()
    result = audit(run.journal)
    print(f"\n{'kill':>5} {'after':>7} {'step':>5} {'survivors':>9}  groups then")
    for number, kill in enumerate(table, 1):
        print(f"{number:>5} {kill.after:>6.1f}s {kill.step:>5} {kill.survivors:>9}  {kill.groups}")
    print(f"\nthe last start ended with status {code} at step {result.steps} of {loaded.run.steps}\n{result}")
    lost = code != 0 or result.steps != loaded.run.steps or result.breaches or any(kill.survivors for kill in table)
    return int(bool(lost))
