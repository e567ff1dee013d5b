"""kill -9 at random moments of a real training run, each time followed by the same command; then an audit.

    python -m tests.campaign examples/math.toml run.dir=/tmp/campaign --faults 10 --seed 0

Exit status 1 on any loss. The table of faults and what each found comes last.
"""

from __future__ import annotations

import argparse
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
class Fault:
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
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def state_of(run: Run) -> tuple[int, str]:
    if not run.journal.exists():
        return 0, "no journal yet"
    status = run.status()
    return status.step, ", ".join(f"{n} {state}" for state, n in status.groups.items())


def campaign(config: list[str], faults: int, seed: int, least: float, most: float) -> int:
    loaded = Config.load(config[0], config[1:])
    run, draw = Run(loaded.run.dir), random.Random(seed)
    log = run.dir.with_name(run.dir.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gspo_agent.cli", "train", *config]
    table: list[Fault] = []
    while len(table) < faults:
        process, after = start(command, log), draw.uniform(least, most)
        try:
            code = process.wait(timeout=after)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the trainer alone: what it started must end by itself
            process.wait()
        else:
            print(f"the run ended by itself with status {code} after {len(table)} faults; give it more steps")
            return 1
        time.sleep(1.0)
        table.append(Fault(after, *state_of(run), survivors=len(members(process.pid))))
        print(f"fault {len(table)}/{faults}: killed after {after:.1f} s at step {table[-1].step}", flush=True)
    code = start(command, log).wait()
    result = audit(run.journal)
    print(f"\n{'fault':>5} {'after':>7} {'step':>5} {'survivors':>9}  groups then")
    for number, fault in enumerate(table, 1):
        print(f"{number:>5} {fault.after:>6.1f}s {fault.step:>5} {fault.survivors:>9}  {fault.groups}")
    print(f"\nthe last start ended with status {code} at step {result.steps} of {loaded.run.steps}\n{result}")
    lost = code != 0 or result.steps != loaded.run.steps or result.breaches or any(f.survivors for f in table)
    return int(bool(lost))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="+", help="a TOML file and key=value changes, as for gspo-agent train")
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=8.0, help="seconds before a kill, at least")
    parser.add_argument("--most", type=float, default=40.0, help="and at most")
    arguments = parser.parse_args()
    sys.exit(campaign(arguments.config, arguments.faults, arguments.seed, arguments.least, arguments.most))
