"""A fresh instance that hangs on its way to where the episode stood holds up nothing."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.clock import Clock
from gspo_agent.config import QuotaConfig, RolloutConfig
from gspo_agent.env import Env
from gspo_agent.messages import Message, user
from gspo_agent.rollout import restore
from gspo_agent.testing import ScriptedEngine
from tests.rollout.scene import CHAT, Run, until

ONE = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)
Result = tuple[list[Message], float, bool, bool, dict[str, Any]]


class Walk(Env):
    """Ends with its second step."""

    state_level = "replay"
    hanging: ClassVar[str] = ""
    """The hook that does not come back, in whatever instance."""
    go: ClassVar[threading.Event] = threading.Event()

    async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.steps = 0
        await self.hang("reset")
        return [user("go")], {}

    async def astep(self, action: Message) -> Result:
        self.steps += 1
        await self.hang("step")
        over = self.steps == 2
        return ([] if over else [user("on")]), float(self.steps), over, False, {}

    async def hang(self, hook: str) -> None:
        if Walk.hanging == hook:
            await asyncio.sleep(3600)


class Sync(Env):
    """The same in a thread, which cannot be interrupted."""

    state_level = "replay"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return [user("go")], {}

    def step(self, action: Message) -> Result:
        self.steps += 1
        if Walk.hanging == "step":
            Walk.go.wait()
        over = self.steps == 2
        return ([] if over else [user("on")]), float(self.steps), over, False, {}


class Kept(Walk):
    state_level = "state"

    def get_state(self) -> Any:
        return self.steps

    async def aset_state(self, state: Any) -> None:
        self.steps = state
        await self.hang("set_state")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Walk.hanging, Walk.go = "", threading.Event()
    yield
    Walk.go.set()


def walker(prompt: Sequence[int], seed: int) -> list[int]:
    return CHAT.turn("step")


async def cut_in_the_second_turn(path: Path, env: type[Env], **quotas: QuotaConfig) -> None:
    engine = ScriptedEngine(walker, chunk=1)
    with Run(path, env, ONE, engine=engine, quotas=quotas) as run:
        engine.hold_at = len(CHAT.open([user("go")], [])) + len(CHAT.turn("step")) + 4
        await run.collector.start(0)
        await until(lambda: len(engine.held) == 2)
        assert [r.episode.turn for r in run.collector._attempts.active.values()] == [1, 1]
        await run.collector.stop()


@pytest.mark.parametrize(
    ("env", "hook", "said"),
    [
        (Walk, "reset", "Walk.reset, which is replayed, takes longer than 0.05 s after a restart"),
        (Walk, "step", "Walk.step, which is replayed to turn 1, takes longer than"),
        (Sync, "step", "Sync.step, which is replayed to turn 1, takes longer than"),
        (Kept, "set_state", "Kept.set_state, takes longer than"),
    ],
)
async def test_a_replay_that_hangs_is_named_and_its_slot_filled_again(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, env: type[Env], hook: str, said: str
) -> None:
    path = fast_path / "journal.sqlite"
    await cut_in_the_second_turn(path, env)
    monkeypatch.setattr(restore, "_LEAST_SECONDS", 0.05)
    monkeypatch.setattr(restore, "_TIMES_AS_LONG", 0.0)
    Walk.hanging = hook
    with Run(path, env, ONE, engine=ScriptedEngine(walker)) as run:
        await run.collector.start(0)
        await until(lambda: sum(run.collector.progress().failures.values()) == 2)
        Walk.hanging = ""
        lease = await run.collector.lease(1, step=1)
        await run.collector.stop()
        (cause,) = run.ledger.status().failures
    assert cause.startswith(f"EnvError: {said}"), cause
    assert "see what it waits for: the episode has failed and is tried again" in cause
    assert [(t.attempt, t.reward) for t in lease.groups[0].trajectories] == [(1, 3.0), (1, 3.0)]


async def test_waiting_for_a_quota_is_not_the_replays_time(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, one = fast_path / "journal.sqlite", QuotaConfig(concurrency=1)
    await cut_in_the_second_turn(path, Walk, step=one)
    now = [0.0]
    monkeypatch.setattr(restore, "_LEAST_SECONDS", 0.02)  # of a clock that is moved by hand
    monkeypatch.setattr(restore, "_TIMES_AS_LONG", 0.0)
    monkeypatch.setattr(restore, "Clock", functools.partial(Clock, lambda: now[0]))
    with Run(path, Walk, ONE, engine=ScriptedEngine(walker), quotas={"step": one}) as run:
        async with run.quota("step"):
            await run.collector.start(0)
            await until(lambda: run.quota("step").waiting == 2)
            now[0] = 3600.0
            await asyncio.sleep(0.1)  # several looks at the clock
        lease = await run.collector.lease(1, step=1)
        await run.collector.stop()
        assert run.ledger.status().failures == {}
    assert [t.attempt for t in lease.groups[0].trajectories] == [0, 0]
