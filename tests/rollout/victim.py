"""A training run without a learner, made to be killed: python -m tests.rollout.victim JOURNAL STEPS."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from gspo_agent.config import RolloutConfig
from gspo_agent.env import ToolEnv, call_id, tool
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import weight_version
from tests.rollout.scene import Run, shopper

OUTSIDE = "calls.txt"


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


class Till(ToolEnv):
    """Every call leaves a line in a file outside of the environment."""

    folder = Path()

    def setup(self, task: dict[str, Any]) -> None:
        self.total = 0
        self.receipt = "x" * 70_000 if task["number"] % 4 == 0 else ""  # some states are blobs

    def prompt(self, task: dict[str, Any]) -> str:
        return f"What is {task['a']} + {task['b']}?"

    @tool
    async def add(self, number: int) -> str:
        """Adds a number to the running total."""
        append(Till.folder / OUTSIDE, call_id())
        await asyncio.sleep(0.005)
        self.total += number
        return str(self.total)

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(self.total == task["a"] + task["b"])


async def main(path: Path, steps: int) -> None:
    Till.folder = path.parent
    config = RolloutConfig(group_size=3, groups_per_step=2, over_provision=1.5, journal_tokens=8, max_filtered=1.0)
    engine = ScriptedEngine(shopper, chunk=4, delay=0.003)
    with Run(path, Till, config, engine=engine) as run:
        last = run.ledger.last_step()
        step = last.step if last else 0
        engine.weight_version = weight_version(run.journal.life, step)
        await run.collector.start(step)
        print("started", flush=True)
        while step < steps:
            lease = await run.collector.lease(2, step=step + 1)
            await asyncio.sleep(0.02)
            step += 1
            # Every second step has a checkpoint: the others are trained again after a kill.
            checkpoint = (f"step-{step}", "hash") if step % 2 == 0 else None
            await run.ledger.commit_step(step, lease, checkpoint, {"groups": [group.id for group in lease.groups]})
            engine.weight_version = weight_version(run.journal.life, step)
        await run.collector.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
