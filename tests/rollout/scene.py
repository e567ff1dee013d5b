"""One small world for the tests of this room: a shop with tools, a policy known beforehand, and a run of both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import orjson

from gspo_agent.config import EnvConfig, Limits, RolloutConfig
from gspo_agent.env import Env, EnvFactory, ToolEnv, tool
from gspo_agent.env.threads import run_sync
from gspo_agent.messages import Message, call, user
from gspo_agent.quota import Quota
from gspo_agent.rollout import schema
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.testing import ByteChat, ScriptedEngine

CHAT = ByteChat()


class Shop(ToolEnv):
    """Add two numbers; the tool keeps a running total and sometimes fails, as `np_random` has it."""

    log: ClassVar[list[str]] = []
    """Every call that ran, over all instances."""

    def setup(self, task: dict[str, Any]) -> None:
        self.total, self.tries = 0, 0

    def prompt(self, task: dict[str, Any]) -> str:
        return f"What is {task['a']} + {task['b']}?"

    @tool
    async def add(self, number: int) -> str:
        """Adds a number to the running total."""
        from gspo_agent.env import call_id

        Shop.log.append(call_id())
        self.tries += 1
        if self.np_random.random() < 0.3:
            return "the till is stuck"
        self.total += number
        return str(self.total)

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"right": float(self.total == task["a"] + task["b"]), "said": float(answer == str(self.total))}


class Guess(Env):
    """A plain environment: guess a number; it keeps no state."""

    state_level = "replay"

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.secret, self.left = int(self.np_random.integers(5)), 3
        return [user("guess")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.left -= 1
        right = action["content"].strip() == str(self.secret)
        over = right or self.left == 0
        messages: list[Message] = [] if over else [user(f"no, {self.left} left")]
        return messages, float(right), over, False, {"components": {"right": float(right)}} if over else {}


class Tasks:
    """An endless source: task n is known beforehand."""

    num_tasks = None

    def task(self, cursor: int) -> dict[str, Any]:
        return {"a": cursor % 7, "b": cursor % 5, "number": cursor}


def shopper(prompt: Sequence[int], seed: int) -> list[int]:
    """A policy with two calls, and then an answer that is not always right; keyed by (seed, length) alone."""
    turn = sum(token == ByteChat.ASSISTANT for token in prompt) - 1
    draw = random.Random(seed * 1000 + turn)
    if turn < 2:
        return CHAT.turn("hm " * draw.randint(0, 3), call("add", number=draw.randint(0, 6)))
    return CHAT.turn(f"it is {draw.randint(0, 9)}")


def guesser(prompt: Sequence[int], seed: int) -> list[int]:
    turn = sum(token == ByteChat.ASSISTANT for token in prompt) - 1
    return CHAT.turn(str(random.Random(seed * 1000 + turn).randint(0, 4)))


@dataclass
class Run:
    """A journal, a ledger, an engine and a collector over them."""

    path: Path
    env: type[Env] = Shop
    config: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            group_size=3, groups_per_step=2, journal_tokens=8, filter_zero_variance=False
        )
    )
    limits: Limits = field(default_factory=Limits)
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(shopper))
    durability: Any = "process"
    chat: ByteChat = CHAT
    quotas: dict[str, Any] = field(default_factory=dict)
    tasks: Any = field(default_factory=lambda: Tasks())

    def __enter__(self) -> Run:
        self.journal = Journal.open(self.path, durability=self.durability)
        self.ledger = Ledger(self.journal)
        self.factory = factory = EnvFactory(EnvConfig(id="shop", quotas=self.quotas), self.env)
        self.collector = Collector(
            journal=self.journal,
            ledger=self.ledger,
            sources=[Source(factory, self.tasks, self.limits)],
            chat=self.chat,
            engine=self.engine,
            config=self.config,
            seed=1,
        )
        return self

    def quota(self, name: str) -> Quota:
        """The one that all instances of the environment share."""
        return self.factory._quotas[name]

    def __exit__(self, *error: object) -> None:
        self.journal.close()
        run_sync(self.factory.aclose())


def nearly_fill(journal: Journal, pages: int) -> None:
    """Lets the file grow by no more than `pages`, as a disk would that has no more room."""
    (size,) = journal.submit(lambda c: c.execute("PRAGMA page_count").fetchone()).result(5)
    journal.submit(lambda c: c.execute(f"PRAGMA max_page_count = {size + pages}")).result(5)


def view(trajectory: Any, versions: bool = False) -> Any:
    """All that makes two trajectories the same, weight versions aside unless asked for."""
    rows = [
        (row.token_ids.tolist(), row.sampled.tolist(), row.rollout_logprobs.tolist(), row.turns.tolist())
        + ((row.weight_versions.tolist(),) if versions else ())
        for row in trajectory.rows()
    ]
    rewards = [(r.turn, r.value, dict(r.components)) for r in trajectory.rewards]
    return rows, rewards, trajectory.messages, trajectory.status, trajectory.stop_reason, trajectory.seed


async def until(condition: Callable[[], Any]) -> None:
    """Waits for something that nobody announces."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def play_to_the_end(run: Run, step: int = 1, num_groups: int = 1) -> list[Any]:
    """Starts the collector, takes one lease and stops."""
    await run.collector.start(step - 1)
    try:
        lease = await run.collector.lease(num_groups, step=step)
    finally:
        await run.collector.stop()
    return [trajectory for group in lease.groups for trajectory in group.trajectories]


def sampled_again(path: Path) -> list[str]:
    """Every place where a slot holds a token for a position that was journaled before."""
    breaches = []
    ends: dict[int, int] = {}
    with closing(schema.read_only(path)) as connection:
        query = "SELECT slot, kind, data, length(token_ids) / 4 FROM events ORDER BY id"
        for slot, kind, data, length in connection.execute(query):
            if kind == "sampled" and orjson.loads(data)[1] != ends.get(slot, 0):
                breaches.append(f"slot {slot}: position {orjson.loads(data)[1]} after {ends.get(slot, 0)}")
            ends[slot] = ends.get(slot, 0) + (length or 0)
    return breaches
