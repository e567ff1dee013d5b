"""Runs that kill themselves with signal 9 at a known moment: python -m tests.rollout.mortal STORY JOURNAL."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from envs.code_sandbox import CodeSandbox
from envs.math_verifier import MathVerifier
from gspo_agent.config import QuotaConfig, RolloutConfig
from gspo_agent.env import Env, ToolEnv, call_id, tool
from gspo_agent.errors import StateLost
from gspo_agent.messages import ToolCall, call
from gspo_agent.testing import ByteChat, ScriptedEngine
from tests.rollout.scene import CHAT, Run, until

ROOT = Path(__file__).parent.parent.parent
THREE = RolloutConfig(group_size=3, groups_per_step=1, over_provision=1.0, journal_tokens=8, filter_zero_variance=False)


def sleeper() -> int:
    """A process that outlives this one."""
    return os.posix_spawnp("sleep", ["sleep", "600"], os.environ, setsid=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Container(ToolEnv):
    """Each episode has a directory and a process outside, which outlive this process."""

    state_level = "handle"
    folder: ClassVar[Path]

    def setup(self, task: dict[str, Any]) -> None:
        self.home = self.folder / self.run_id / self.episode_id
        self.home.mkdir(parents=True)
        (self.home / "pid").write_text(str(sleeper()))

    def prompt(self, task: dict[str, Any]) -> str:
        return "pack"

    @tool
    def put(self, thing: str) -> str:
        """Put something in."""
        with (self.home / "things").open("a") as file:
            file.write(thing)
        return f"{(self.home / 'things').read_text()} in {(self.home / 'pid').exists()}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(len((self.home / "things").read_text()))

    def get_state(self) -> Any:
        return str(self.home)

    def set_state(self, state: Any) -> None:
        self.home = Path(state)
        if not self.home.exists() or not alive(int((self.home / "pid").read_text())):
            raise StateLost(f"{state} is gone")

    def close(self) -> None:
        remove(self.home)

    @classmethod
    async def destroy_leftovers(cls, run_id: str, living: Collection[str], **options: Any) -> None:
        for home in (cls.folder / run_id).glob("*"):
            if home.name not in living:
                remove(home)


def remove(home: Path) -> None:
    if home.exists():
        os.kill(int((home / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(home)


class Errands(ToolEnv):
    """Three calls of one message: the first has ended, the second runs, the third waits for it when the end comes."""

    folder: ClassVar[Path]

    def prompt(self, task: dict[str, Any]) -> str:
        return "go"

    @tool(parallel=True)
    async def run(self, errand: int) -> str:
        """Run an errand."""
        with (self.folder / "errands").open("a") as file:
            file.write(call_id() + "\n")
        if errand == 1 and os.environ.get("MORTAL"):
            await asyncio.sleep(0.1)  # by then the end of the first call is on disk
            die()
        return f"errand {errand}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 1.0


class Database(ToolEnv):
    """Its state is a dump of what only the thread that opened it may touch."""

    folder: ClassVar[Path]

    def setup(self, task: dict[str, Any]) -> None:
        self.db = sqlite3.connect(":memory:")
        self.db.execute("CREATE TABLE sold (number INTEGER)")

    def prompt(self, task: dict[str, Any]) -> str:
        return "sell"

    @tool(timeout=20)
    def sell(self, number: int) -> str:
        """Sell."""
        self.db.execute("INSERT INTO sold VALUES (?)", (number,))
        return str(self.db.execute("SELECT group_concat(number) FROM sold").fetchone()[0])

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(self.db.execute("SELECT count(*) = 2 FROM sold").fetchone()[0])

    def get_state(self) -> Any:
        return list(self.db.iterdump())

    def set_state(self, state: Any) -> None:
        self.db = sqlite3.connect(":memory:")
        for line in state:
            self.db.execute(line)

    def close(self) -> None:
        self.db.close()


def policy(*turns: Sequence[ToolCall] | str) -> Callable[[Sequence[int], int], list[int]]:
    """Each turn is text, or calls."""

    def play(prompt: Sequence[int], seed: int) -> list[int]:
        turn = turns[sum(token == ByteChat.ASSISTANT for token in prompt) - 1]
        return CHAT.turn(turn) if isinstance(turn, str) else CHAT.turn("", *turn)

    return play


@dataclass
class One:
    """One task, again and again."""

    given: dict[str, Any]
    num_tasks = None

    def task(self, cursor: int) -> dict[str, Any]:
        return self.given


@dataclass
class Story:
    env: type[Env]
    policy: Any
    task: dict[str, Any] = field(default_factory=dict)
    quotas: dict[str, QuotaConfig] = field(default_factory=dict)

    def run(self, path: Path, delay: float = 0.0) -> Run:
        """`delay`: seconds per 16 tokens."""
        self.env.folder = path.parent / "outside"  # type: ignore[attr-defined]
        self.env.folder.mkdir(exist_ok=True)  # type: ignore[attr-defined]
        engine = ScriptedEngine(self.policy, delay=delay)
        return Run(path, self.env, THREE, engine=engine, quotas=self.quotas, tasks=One(self.task))


TESTS = [{"args": [3], "expected": 6}, {"args": [0], "expected": 0}]
STORIES = {
    "container": Story(Container, policy([call("put", thing="a")], [call("put", thing="b")], "done")),
    "errands": Story(
        Errands,
        policy([call("run", errand=0), call("run", errand=1), call("run", errand=2)], "done"),
        quotas={"run": QuotaConfig(concurrency=1)},
    ),
    "database": Story(Database, policy([call("sell", number=2)], [call("sell", number=3)], "done")),
    "math": Story(
        MathVerifier,
        policy(
            [call("python", code="import random; random.seed(7); x = random.random(); open('f', 'w').write('41')")],
            [call("python", code="x, open('f').read()")],
            r"\boxed{42}",
        ),
        {"problem": "6 * 7?", "gold": "42"},
    ),
    "code": Story(
        CodeSandbox,
        policy(
            [call("write", code="def double(n):\n    return n"), call("test")],
            [call("edit", old="return n", new="return 2 * n"), call("test")],
            "handed in",
        ),
        {"prompt": "double", "kind": "call", "entry_point": "double", "public_tests": TESTS, "hidden_tests": TESTS},
    ),
}


def killed(story: str, path: Path) -> None:
    """Plays the story in a process of its own until that kills itself."""
    command = [sys.executable, "-m", "tests.rollout.mortal", story, str(path)]
    victim = subprocess.run(command, cwd=ROOT, env={**os.environ, "MORTAL": "1"}, check=False, timeout=60)
    assert victim.returncode == -signal.SIGKILL


async def all_in_the_second_turn(run: Run) -> None:
    """Those that are ahead wait there for the others."""
    active = run.collector._attempts.active
    await until(lambda: any(recorder.episode.turn >= 1 for recorder in active.values()))
    run.engine.hold_at = max(len(recorder.episode.token_ids) for recorder in active.values()) + 4
    await until(lambda: len(run.engine.held) == 3)
    assert [recorder.episode.turn for recorder in active.values()] == [1, 1, 1]


async def main(story: str, path: Path) -> None:
    """Dies when every episode has the answer to its first turn, and all of that is on disk."""
    with STORIES[story].run(path, delay=0.003) as run:
        await run.collector.start(0)
        await all_in_the_second_turn(run)
        run.journal.flush()
        die()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
