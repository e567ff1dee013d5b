"""A stop cuts requests at once, lets tools end within the grace, and leaves everything on disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.config import RolloutConfig
from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import JournalError
from gspo_agent.messages import call
from gspo_agent.rollout import collector as module
from gspo_agent.rollout.ledger import NewGroup
from gspo_agent.testing import ScriptedEngine
from tests.rollout.moves import create
from tests.rollout.scene import CHAT, Run, Shop, play_to_the_end, until, view

CONFIG = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)


class Counter(ToolEnv):
    """Counts on the outside how often each call began and ended, and waits between the two."""

    go: asyncio.Event
    began: list[str]
    ended: list[str]

    def setup(self, task: dict[str, Any]) -> None:
        self.total = 0

    def prompt(self, task: dict[str, Any]) -> str:
        return "go"

    @tool
    async def add(self, number: int) -> str:
        """Adds."""
        from gspo_agent.env import call_id

        name = call_id().partition("/")[2]  # without the run's
        type(self).began.append(name)
        await type(self).go.wait()
        type(self).ended.append(name)
        self.total += number
        return str(self.total)

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(self.total)


def counter() -> type[Counter]:
    return type("Counter", (Counter,), {"go": asyncio.Event(), "began": [], "ended": []})


def calls_then_answer(prompt: Any, seed: int) -> list[int]:
    turn = sum(token == CHAT.ASSISTANT for token in prompt) - 1
    return CHAT.turn("", call("add", number=1), call("add", number=2)) if turn == 0 else CHAT.turn("done")


async def test_a_tool_that_ends_within_the_grace_is_journaled_and_no_other_begins(fast_path: Path) -> None:
    path, env = fast_path / "journal.sqlite", counter()
    with Run(path, env, CONFIG, engine=ScriptedEngine(calls_then_answer)) as run:
        await run.collector.start(0)
        await until(lambda: len(env.began) == 2)
        stopping = asyncio.create_task(run.collector.stop(grace=3600.0))
        await asyncio.sleep(module._CUT_SECONDS + 0.2)
        assert not stopping.done()
        env.go.set()
        async with asyncio.timeout(10):
            await stopping
        assert sorted(env.ended) == ["1.0.0/0/0", "1.1.0/0/0"]
    with Run(path, env, CONFIG, engine=ScriptedEngine(calls_then_answer)) as run:
        trajectories = await play_to_the_end(run)
    assert sorted(env.began) == sorted(f"1.{member}.0/0/{position}" for member in (0, 1) for position in (0, 1))
    for trajectory in trajectories:
        assert [m.get("outcome") for m in trajectory.messages if m["role"] == "tool"] == ["ok", "ok"]
        assert trajectory.reward == 3.0


async def test_a_tool_that_does_not_end_within_the_grace_was_interrupted(fast_path: Path) -> None:
    path, env = fast_path / "journal.sqlite", counter()
    with Run(path, env, CONFIG, engine=ScriptedEngine(calls_then_answer)) as run:
        await run.collector.start(0)
        await until(lambda: len(env.began) == 2)
        async with asyncio.timeout(10):
            await run.collector.stop(grace=module._CUT_SECONDS + 0.2)
    env.go.set()
    with Run(path, env, CONFIG, engine=ScriptedEngine(calls_then_answer)) as run:
        trajectories = await play_to_the_end(run)
    for trajectory in trajectories:
        told = [m.get("outcome") for m in trajectory.messages if m["role"] == "tool"]
        assert told == ["interrupted", "ok"]
        assert trajectory.reward == 2.0


async def test_a_judge_gets_the_grace_too_and_what_is_neither_tool_nor_judge_gets_none(fast_path: Path) -> None:
    """A reset that hangs would begin again anyway; nobody waits an hour for it."""
    go, judging, resetting = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Judged(Shop):
        async def setup(self, task: dict[str, Any]) -> None:
            if self.episode_id.startswith("2."):
                resetting.set()
                await asyncio.sleep(3600)
            Shop.setup(self, task)

        async def score(self, task: dict[str, Any], answer: str) -> Any:
            judging.set()
            await go.wait()
            return Shop.score(self, task, answer)

    config = CONFIG.model_copy(update={"over_provision": 2.0})
    with Run(fast_path / "journal.sqlite", Judged, config) as run:
        await run.collector.start(0)
        await until(lambda: judging.is_set() and resetting.is_set() and run.collector.progress().in_tools == 2)
        stopping = asyncio.create_task(run.collector.stop(grace=3600.0))
        await asyncio.sleep(module._CUT_SECONDS + 0.2)
        assert not stopping.done()
        go.set()
        async with asyncio.timeout(10):
            await stopping
        assert run.ledger.status().slots == {"done": 2, "running": 2}
        assert [ready.id for ready in run.ledger.ready()] == [1]


async def test_what_swallows_its_cancellation_is_left_behind_with_a_warning(
    fast_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go, inside = asyncio.Event(), []

    class Stubborn(Shop):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            inside.append(self.episode_id)
            while not go.is_set():
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    continue
            return "0"

    path = fast_path / "journal.sqlite"
    with Run(path, Stubborn, CONFIG) as run:
        await run.collector.start(0)
        await until(lambda: len(inside) == 2)
        async with asyncio.timeout(10):
            await run.collector.stop()
        assert "2 episodes do not end when they are cancelled" in caplog.text
        left = list(run.collector._tasks)
        go.set()
        await asyncio.wait(left)
    with Run(path, Stubborn, CONFIG) as run:
        assert len(await play_to_the_end(run)) == 2


@pytest.mark.parametrize("place", ["journal", "memory"])
async def test_a_stop_before_anything_has_begun_begins_nothing(fast_path: Path, place: str) -> None:
    with Run(fast_path / "journal.sqlite", Shop, CONFIG) as run:
        if place == "journal":
            await create(run.ledger, new_group())
        await run.collector.start(0)
        await run.collector.stop()
        assert not run.engine.requests
        assert run.ledger.status().slots == ({"waiting": 2} if place == "journal" else {})


def new_group() -> NewGroup:
    return NewGroup(0, 0, "shop", {"a": 1, "b": 2, "number": 0}, 2, 3, 2, 1)


class Repeatable(Shop):
    """Its tool waits for nothing to be on disk."""

    @tool(idempotent=True)
    async def add(self, number: int) -> str:
        """Adds a number to the running total."""
        self.total += number
        return str(self.total)


@asynccontextmanager
async def a_disk_that_stands_still(run: Run) -> AsyncIterator[threading.Event]:
    """In here each episode has sampled one turn, all of it waits for the disk, and there is room for no more of it.
    The disk goes on with the event."""
    run.engine.hold_at = 0
    run.journal._queued_bytes = 1
    await run.collector.start(0)
    await until(lambda: len(run.engine.held) == 2)
    go = threading.Event()
    run.journal.submit(lambda connection: go.wait(20))
    run.engine.hold_at = None
    await until(lambda: {r.stage for r in run.collector._attempts.active.values()} == {"journal"})
    try:
        yield go
    finally:
        go.set()


async def test_a_slow_disk_holds_up_requests_and_not_the_growth_of_memory(fast_path: Path) -> None:
    with Run(fast_path / "whole.sqlite", Repeatable, CONFIG) as run:
        whole = await play_to_the_end(run)
    with Run(fast_path / "slow.sqlite", Repeatable, CONFIG) as run:
        async with a_disk_that_stands_still(run) as go:
            assert len(run.engine.requests) == 2
            queued = run.journal.queued
            await asyncio.sleep(0.05)
            assert len(run.engine.requests) == 2
            assert run.journal.queued == queued > 1
            go.set()
            lease = await run.collector.lease(1, step=1)
            await run.collector.stop()
        assert run.journal.queued == 0
    assert [view(t) for group in lease.groups for t in group.trajectories] == [view(t) for t in whole]


async def test_a_stop_ends_the_waiting_for_a_disk_that_stands_still(fast_path: Path) -> None:
    with Run(fast_path / "slow.sqlite", Repeatable, CONFIG) as run:
        async with a_disk_that_stands_still(run) as go:
            stopping = asyncio.create_task(run.collector.stop())
            await until(lambda: not run.collector._tasks)
            assert not stopping.done()  # it promises that all is on disk
            go.set()
            await stopping
        assert run.journal.queued == 0


async def test_a_disk_that_fails_ends_the_waiting_for_room(fast_path: Path) -> None:
    with pytest.raises(JournalError, match="disk"), Run(fast_path / "full.sqlite", Repeatable, CONFIG) as run:  # noqa: PT012
        async with a_disk_that_stands_still(run) as go:

            def fail(connection: sqlite3.Connection) -> None:
                raise sqlite3.OperationalError("disk I/O error")

            run.journal.submit(fail)
            go.set()
            async with asyncio.timeout(10):
                await run.collector.lease(1, step=1)
