"""kill -9 at random moments of a real `gspo-agent train CONFIG`, each time followed by the same command; an audit.

Where the learner has a process of its own, half of the kills are of that one: the run then ends by itself and says so.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gspo_agent.config import Config
from gspo_agent.rollout.audit import audit
from gspo_agent.run import Run

_PATIENCE = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Kill:
    whom: str
    after: float
    """Seconds since the start of the process."""
    step: int
    """The last committed step at the moment of the kill."""
    groups: str
    survivors: int
    """Processes of the run's session that were still there a second later."""
    loss: str = ""
    """What the run did instead of ending with an error that names the learner."""


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


def learner_of(trainer: int) -> int | None:
    """The learner's own process, while there is one."""
    for pid in members(trainer):
        with suppress(OSError):
            if b"gspo_agent.learner" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    return None


def kill(trainer: subprocess.Popen[bytes], whom: str, log: Path) -> tuple[str, str]:
    """Kills the one or the other; returns which, and what went wrong afterwards."""
    learner = learner_of(trainer.pid) if whom == "learner" else None
    said = log.stat().st_size
    os.kill(learner or trainer.pid, signal.SIGKILL)  # this one alone: what it started must end by itself
    if learner is None:
        trainer.wait()
        return "trainer", ""
    try:
        code = trainer.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        trainer.kill()
        trainer.wait()
        return "learner", f"the run had not ended {_PATIENCE:g} s after its learner"
    with log.open("rb") as file:
        file.seek(said)
        named = f"the learner's process (pid {learner}) ended".encode() in file.read()
    return "learner", "" if code == 1 and named else f"status {code}, and the log {'names' if named else 'lacks'} it"


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
        whom = draw.choice(("trainer", "learner")) if loaded.rollout.mode == "async" else "trainer"
        try:
            code = process.wait(timeout=after)
        except subprocess.TimeoutExpired:
            whom, loss = kill(process, whom, log)
        else:
            print(f"the run ended by itself with status {code} after {len(table)} kills; give it more steps")
            return 1
        time.sleep(1.0)
        table.append(Kill(whom, after, *state_of(run), survivors=len(members(process.pid)), loss=loss))
        print(f"kill {len(table)}/{kills}: the {whom}, after {after:.1f} s at step {table[-1].step}", flush=True)
    code = start(command, log).wait()
    result = audit(run.journal)
    print(f"\n{'kill':>5} {'of':>7} {'after':>7} {'step':>5} {'survivors':>9}  groups then")
    for number, one in enumerate(table, 1):
        print(f"{number:>5} {one.whom:>7} {one.after:>6.1f}s {one.step:>5} {one.survivors:>9}  {one.groups}")
        if one.loss:
            print(f"LOSS: {one.loss}")
    print(f"\nthe last start ended with status {code} at step {result.steps} of {loaded.run.steps}\n{result}")
    lost = code != 0 or result.steps != loaded.run.steps or result.breaches
    return int(bool(lost or any(one.survivors or one.loss for one in table)))
