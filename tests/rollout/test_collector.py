"""Many episodes at once: what is unfinished is kept, what is finished is handed out once, and a stop is prompt."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.engine.base import Completion, Weights
from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import EnvError, JournalError
from gspo_agent.learner.batch import make_batch
from gspo_agent.monitor.metrics import staleness
from gspo_agent.rollout import collector as module
from gspo_agent.rollout.ledger import read_status
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import Status, weight_version
from tests.rollout.scene import CHAT, Run, Shop, nearly_fill, play_to_the_end, sampled_again, shopper, until, view


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(
        **{"group_size": 2, "groups_per_step": 2, "over_provision": 2.0, "filter_zero_variance": False, **changes}
    )


class Slowly(ScriptedEngine):
    """Episodes of the groups in `slow` are held back; the place of a group is in its prompt."""

    slow: ClassVar[set[str]] = set()

    async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
        while request_id.split(".")[2] in self.slow:
            if request_id in self._aborted:
                return await super().generate(token_ids, sampling, request_id=request_id)
            self._live.add(request_id)
            await asyncio.sleep(0.001)
        self._live.discard(request_id)
        return await super().generate(token_ids, sampling, request_id=request_id)


async def test_slow_groups_stay_in_flight_and_go_on_under_the_next_weights(fast_path: Path) -> None:
    engine = Slowly(shopper, weight_version=1_000_000)
    engine.slow = {"1", "3"}
    with Run(fast_path / "journal.sqlite", Shop, config(), engine=engine) as run:
        await run.collector.start(0)
        first = await run.collector.lease(2, step=1)
        assert sorted(group.id for group in first.groups) == [2, 4]
        await run.ledger.commit_step(1, first, ("step-1", "h"), {})
        engine.weight_version = 1_000_001
        engine.slow = set()
        second = await run.collector.lease(2, step=2)
        third = await run.collector.lease(2, step=3)
        ids = [group.id for lease in (second, third) for group in lease.groups]
        assert {1, 3} <= set(ids)
        assert len(set(ids)) == 4
        kept = [t for lease in (second, third) for g in lease.groups if g.id in (1, 3) for t in g.trajectories]
        assert {s.weight_version for t in kept for s in t.segments if s.sampled} == {1_000_001}
        await run.collector.stop()


async def test_finished_surplus_groups_are_the_next_lease_and_generate_nothing(fast_path: Path) -> None:
    with Run(fast_path / "journal.sqlite", Shop, config()) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().ready_groups >= 4)
        asked = len(run.engine.requests)
        first = await run.collector.lease(2, step=1)
        second = await run.ledger.lease(2, 2, max_filtered=0)
        assert second is not None
        assert sorted(g.id for lease in (first, second) for g in lease.groups) == [1, 2, 3, 4]
        assert len(run.engine.requests) == asked
        await run.collector.stop()


def groups_asked(engine: ScriptedEngine) -> set[int]:
    """The groups that this engine sampled tokens for."""
    return {int(request_id.split(".")[2]) for request_id, _, tokens in engine.requests if tokens}


async def test_every_task_that_was_served_is_trained_once_over_any_number_of_lives(fast_path: Path) -> None:
    """Each life trains a step and is stopped while half of its groups are far behind: finished ones that no step took,
    partial ones and the place in the data come back, and what is finished is not sampled again."""
    path = fast_path / "journal.sqlite"
    trained: list[int] = []

    async def live(step: int, slow: set[str], enough: int = 0) -> int:
        """Trains one step, or as many as it takes to have trained the first `enough` groups."""
        engine = Slowly(shopper)
        engine.slow = slow
        with Run(path, Shop, config(), engine=engine) as run:
            finished = {group.id for group in run.ledger.ready()} | set(trained)
            await run.collector.start(step - 1)
            while True:
                lease = await run.collector.lease(2, step=step)
                await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
                trained.extend(group.id for group in lease.groups)
                step += 1
                if set(range(1, enough + 1)) <= set(trained):
                    break
            await run.collector.stop()
            assert not groups_asked(engine) & finished
            return run.ledger.cursors()[0]

    for step in range(1, 6):
        # Of the four in flight at most two are held back, and not always the oldest.
        behind = [group for group in range(1, 40) if group not in trained and group % 3 == step % 3]
        served = await live(step, {str(group) for group in behind[:2]})
    assert len(trained) == 10 < served
    await live(6, set(), enough=served)
    assert len(trained) == len(set(trained))
    assert not sampled_again(path)
    with Run(path) as run:
        query = "SELECT cursor FROM groups ORDER BY id"
        tasks = [cursor for (cursor,) in run.journal.submit(lambda c: c.execute(query).fetchall()).result(5)]
        assert tasks == list(range(run.ledger.cursors()[0]))


async def test_recoveries_let_neither_the_groups_in_flight_nor_the_age_of_tokens_grow(fast_path: Path) -> None:
    """A life begins with empty memory: it still asks for no more groups than are wanted in all, and age is counted in
    steps of the run, whatever the life's own counters say."""
    path = fast_path / "journal.sqlite"
    step, ages = 0, []
    for life in range(6):
        engine = ScriptedEngine(shopper)
        with Run(path, Shop, config(), engine=engine) as run:
            engine.weight_version = weight_version(run.journal.life, step)
            await run.collector.start(step)
            for _ in range(3 if life % 2 else 0):  # every second life dies before it trains anything
                lease = await run.collector.lease(2, step=step + 1)
                step += 1
                engine.weight_version = weight_version(run.journal.life, step)
                await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
                ages.append(staleness([t for g in lease.groups for t in g.trajectories], step)["staleness/max"])
            await until(lambda run=run: run.collector.progress().ready_groups == 4)
            assert run.ledger.cursors()[0] == 2 * step + 4
            await run.collector.stop()
    assert len(ages) == 9
    assert max(ages) <= 2


@pytest.mark.parametrize("torn", [0, 1, 3000, 20_000])
async def test_finished_members_of_an_unfinished_group_survive_a_torn_log_and_two_restarts(
    fast_path: Path, torn: int
) -> None:
    """Killed while one member of three is under way; the last `torn` bytes of the write-ahead log never reached the
    disk. Nothing that is there is sampled again, and no id of any kind is given twice."""
    three = config(group_size=3, groups_per_step=1, over_provision=1.0, journal_tokens=7)

    class Repeatable(Shop):
        @tool(idempotent=True)
        async def add(self, number: int) -> str:
            """Adds a number to the running total."""
            return str(await Shop.add.function(self, number))

    with Run(fast_path / "whole.sqlite", Repeatable, three) as run:
        whole = await play_to_the_end(run)

    class OneBehind(ScriptedEngine):
        async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
            if request_id.split(".")[3] == "1" and len(token_ids) > 300:
                self._live.add(request_id)
                self.held.add(request_id)
                while request_id not in self._aborted:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                return Completion((), "abort")
            return await super().generate(token_ids, sampling, request_id=request_id)

    alive = fast_path / "alive" / "journal.sqlite"
    engine = OneBehind(shopper)
    requests: list[str] = []
    with Run(alive, Repeatable, three, engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.ledger.status().slots == {"done": 2, "running": 1} and engine.held)
        await run.journal.transact(lambda connection: None)
        shutil.copytree(alive.parent, fast_path / "killed")
        requests += [request_id for request_id, *_ in engine.requests]
        await run.collector.stop()
    path = fast_path / "killed" / "journal.sqlite"
    log = path.with_name("journal.sqlite-wal")
    os.truncate(log, log.stat().st_size - torn)

    engine = OneBehind(shopper)
    with Run(path, Repeatable, three, engine=engine) as run:
        done = run.ledger.status().slots.get("done", 0)
        assert done == 2 or torn
        await run.collector.start(0)
        await until(lambda: engine.held)
        await run.collector.stop()
        requests += [request_id for request_id, *_ in engine.requests]
    with Run(path, Repeatable, three) as run:
        resumed = await play_to_the_end(run)
        requests += [request_id for request_id, *_ in run.engine.requests]
    assert [view(t) for t in resumed] == [view(t) for t in whole]
    assert not sampled_again(path)
    assert len(set(requests)) == len(requests)
    again = [request_id for request_id, *_ in engine.requests if request_id.split(".")[3] != "1"]
    assert not again or torn


async def test_a_lease_that_was_not_committed_is_leased_again_identically(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with Run(path, Shop, config(over_provision=1.0)) as run:
        await run.collector.start(0)
        before = await run.collector.lease(2, step=1)
        await run.collector.stop()
    engine = ScriptedEngine(shopper)
    await engine.pause()
    with Run(path, Shop, config(groups_per_step=1, over_provision=1.0), engine=engine) as run:
        await run.collector.start(0)
        async with asyncio.timeout(10):
            after = await run.collector.lease(1, step=1)
        await run.collector.stop()
    assert [g.id for g in after.groups] == [g.id for g in before.groups]
    assert not [tokens for _, _, tokens in engine.requests if tokens]
    assert [[view(t, versions=True) for t in g.trajectories] for g in after.groups] == [
        [view(t, versions=True) for t in g.trajectories] for g in before.groups
    ]


async def test_leases_since_the_last_checkpoint_come_back_one_by_one(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with Run(path, Shop, config()) as run:
        await run.collector.start(0)
        leases = []
        for step in (1, 2, 3):
            leases.append(await run.collector.lease(2, step=step))
            await run.ledger.commit_step(step, leases[-1], ("step-1", "h") if step == 1 else None, {})
        await run.collector.stop()
    with Run(path, Shop, config()) as run:
        last = run.ledger.last_step()
        assert last is not None
        assert last.step == 1
        await run.engine.pause()
        await run.collector.start(1)
        for step in (2, 3):
            async with asyncio.timeout(10):
                again = await run.collector.lease(2, step=step)
            assert [g.id for g in again.groups] == [g.id for g in leases[step - 1].groups]
            await run.ledger.commit_step(step, again, None, {})
        await run.engine.resume()
        fresh = await run.collector.lease(2, step=4)
        assert not {g.id for g in fresh.groups} & {g.id for lease in leases for g in lease.groups}
        await run.ledger.commit_step(4, fresh, ("step-4", "h"), {})
        await run.collector.stop()
        assert run.ledger.status().groups["consumed"] == 8


class Fixed(ToolEnv):
    """The reward is what the task says, for every member; where members differ, the judge waits."""

    differ: ClassVar[asyncio.Event]

    def prompt(self, task: dict[str, Any]) -> str:
        return "go"

    async def score(self, task: dict[str, Any], answer: str) -> float:
        if task["number"] % 3:
            return 1.0
        await self.differ.wait()
        return float(self.episode_id.split(".")[1])


def answerer(prompt: Sequence[int], seed: int) -> list[int]:
    return CHAT.turn("done")


async def test_flat_groups_are_filtered_with_the_step_and_bounded(fast_path: Path) -> None:
    with Run(fast_path / "a.sqlite", Fixed, config(filter_zero_variance=True), engine=ScriptedEngine(answerer)) as run:
        Fixed.differ = asyncio.Event()
        await run.collector.start(0)
        await until(lambda: sum(group.flat for group in run.ledger.ready()) >= 2)
        Fixed.differ.set()
        lease = await run.collector.lease(2, step=1)
        assert [group.task["number"] % 3 for group in lease.groups] == [0, 0]
        assert len(lease.filtered) >= 2
        assert all(group.task["number"] % 3 for group in lease.filtered)
        assert run.ledger.status().groups.get("filtered", 0) == 0
        await run.ledger.commit_step(1, lease, ("step-1", "h"), {})
        assert run.ledger.status().groups["filtered"] == len(lease.filtered)
        await run.collector.stop()
    # A task set without any variance: the run goes on, with at most max_filtered * groups_per_step left out.
    always = type("Always", (Fixed,), {"score": lambda self, task, answer: 1.0})
    bounded = config(filter_zero_variance=True, max_filtered=1.5)
    with Run(fast_path / "b.sqlite", always, bounded, engine=ScriptedEngine(answerer)) as run:
        async with asyncio.timeout(10):
            await run.collector.start(0)
            lease = await run.collector.lease(2, step=1)
        assert (len(lease.groups), len(lease.filtered)) == (2, 3)
        await run.collector.stop()


class Heavy(Shop):
    """Its state is too large for a row."""

    def setup(self, task: dict[str, Any]) -> None:
        super().setup(task)
        self.receipt = f"{self.episode_id} " + "x" * 70_000


async def test_blobs_go_with_the_step_that_settles_their_groups(fast_path: Path) -> None:
    def blobs() -> set[str]:
        return {path.name for path in (fast_path / "blobs").rglob("*") if path.is_file()}

    engine = Slowly(shopper)
    with Run(fast_path / "journal.sqlite", Heavy, config(over_provision=1.5), engine=engine) as run:
        engine.slow = {"3", "4", "5"}
        await run.collector.start(0)
        lease = await run.collector.lease(2, step=1)
        await until(lambda: run.collector.progress().generating >= 2)
        await run.journal.transact(lambda connection: None)
        before = blobs()
        await run.ledger.commit_step(1, lease, None, {})
        assert blobs() >= before
        await run.collector.stop()
    with Run(fast_path / "journal.sqlite", Heavy, config(), engine=ScriptedEngine(shopper)) as run:
        lease_again = await run.ledger.lease(1, 2, max_filtered=0)
        assert lease_again is not None
        await run.ledger.commit_step(1, lease_again, ("step-1", "h"), {})
        kept = blobs()
        assert before - kept
        query = (
            "SELECT DISTINCT blob FROM events JOIN slots ON slots.id = slot JOIN groups ON groups.id = group_id "
            "WHERE blob IS NOT NULL AND groups.state = 'open'"
        )
        needed = {blob for (blob,) in run.journal.submit(lambda c: c.execute(query).fetchall()).result(5)}
        assert kept == needed
        assert needed
        # What was kept is what the open episodes go on from.
        await run.collector.start(1)
        assert await run.collector.lease(2, step=2)
        assert not run.collector.progress().restarts
        await run.collector.stop()


class Flaky(Shop):
    """Every first attempt of member 1 dies in its tool."""

    @tool
    async def add(self, number: int) -> str:
        """Adds."""
        _, member, attempt = self.episode_id.split(".")
        if member == "1" and attempt == "0":
            raise ConnectionError("the till does not answer")
        return "7"


async def test_a_failed_episode_is_filled_again_and_counted(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 0.01)
    with Run(fast_path / "journal.sqlite", Flaky, config()) as run:
        trajectories = await play_to_the_end(run, num_groups=2)
        assert [t.attempt for t in trajectories] == [0, 1, 0, 1]
        assert all("till does not answer" in cause for cause in run.collector.progress().failures)
        status = run.ledger.status()
        assert sum(status.failures.values()) == status.slots["failed"] >= 2


async def test_random_faults_of_environments_cost_no_group_no_step_and_no_reward(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One episode in twelve meets a fault that is not the policy's. Every group comes whole, and of the members that
    failed nothing is trained on, least of all a reward of 0."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 0.0)

    class Unlucky(Shop):
        def _luck(self, share: float) -> None:
            if random.Random(self.episode_id).random() < share:
                raise ConnectionError("the network is gone")

        async def setup(self, task: dict[str, Any]) -> None:
            self._luck(0.03)
            super().setup(task)

        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            self._luck(0.06)
            self.total += number
            return str(self.total)

        def score(self, task: dict[str, Any], answer: str) -> Any:
            self._luck(0.08)
            return {"scored": 1.0, **super().score(task, answer)}

    with Run(fast_path / "journal.sqlite", Unlucky, config(group_size=8, groups_per_step=4)) as run:
        await run.collector.start(0)
        members = []
        for step in (1, 2, 3):
            lease = await run.collector.lease(4, step=step)
            assert [len(group.trajectories) for group in lease.groups] == [8] * 4
            members += [t for group in lease.groups for t in group.trajectories]
            await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
        await run.collector.stop()
        status = run.ledger.status()
    assert {t.status for t in members} == {Status.TERMINATED}
    assert all(t.rewards[-1].components["scored"] == 1.0 for t in members)
    assert any(t.attempt for t in members)
    assert sum(status.failures.values()) == status.slots["failed"] >= 5
    assert "given_up" not in status.groups


@pytest.mark.parametrize(("min_group", "sizes"), [(5, [5, 8]), (6, [8, 8])])
async def test_a_group_without_some_members_is_normalised_by_itself_or_given_up(
    fast_path: Path, min_group: int, sizes: list[int]
) -> None:
    """Three of eight members of the first group fail for good, beside groups that are whole."""

    class Hopeless(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            group, member, _ = map(int, self.episode_id.split("."))
            if group == 1 and member in (0, 3, 7):
                raise ConnectionError("no such shop")
            super().setup(task)

        def score(self, task: dict[str, Any], answer: str) -> float:
            group, member, _ = map(int, self.episode_id.split("."))
            return 100.0 * group + member % 4

    settings = config(group_size=8, max_attempts=1, min_group=min_group, over_provision=1.0)
    with Run(fast_path / "journal.sqlite", Hopeless, settings) as run:
        await run.collector.start(0)
        lease = await run.collector.lease(2, step=1)
        await run.collector.stop()
        assert run.ledger.status().groups.get("given_up", 0) == (min_group == 6)
    groups = sorted(lease.groups, key=lambda group: group.id)
    assert [len(group.trajectories) for group in groups] == sizes
    batch = make_batch(groups, step=1, max_weight_lag=None, advantage_std=True)
    ends = np.cumsum([0, *sizes])
    for group, a, b in zip(groups, ends[:-1], ends[1:], strict=True):
        rewards = np.array([100.0 * group.id + t.index % 4 for t in group.trajectories])
        np.testing.assert_allclose(batch.advantages[a:b], (rewards - rewards.mean()) / rewards.std())


async def test_an_update_waits_for_no_tool_and_a_paused_engine_gives_no_token(fast_path: Path) -> None:
    """Every episode is in a tool that takes as long as it likes. The weights change meanwhile; a tool that ends during
    the pause brings no token; what is sampled after it is of the new weights."""
    go, ended = asyncio.Event(), []

    class Patient(Shop):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            await go.wait()
            ended.append(self.episode_id)
            self.total += number
            return str(self.total)

    engine = ScriptedEngine(shopper)
    with Run(fast_path / "journal.sqlite", Patient, config(), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().in_tools == 8)
        before = len(engine.requests)
        async with asyncio.timeout(10):
            await run.collector.pause()
            await engine.update_weights(Weights(1_000_001, None, lambda: ()))
        assert not ended
        go.set()
        await until(lambda: run.collector.progress().generating == 8)
        assert len(ended) == 8
        assert len(engine.requests) == before
        await run.collector.resume()
        lease = await run.collector.lease(2, step=2)
        await run.collector.stop()
    for trajectory in (t for group in lease.groups for t in group.trajectories):
        versions = {s.turn: s.weight_version for s in trajectory.segments if s.sampled}
        assert versions == {0: 0, 1: 1_000_001, 2: 1_000_001}


async def test_an_episode_that_outlives_several_updates_is_trained_on_within_the_age_limit(fast_path: Path) -> None:
    """The trainer is four versions ahead before group 1 ends. Each token has the version that sampled it; when the
    group is consumed, exactly the tokens over the limit are left out, and the ages are in the step's metrics."""
    allowed = asyncio.Semaphore(0)

    class OneByOne(ScriptedEngine):
        async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
            if request_id.split(".")[2] == "1":
                await allowed.acquire()
            return await super().generate(token_ids, sampling, request_id=request_id)

    engine = OneByOne(shopper)
    limited = config(groups_per_step=1, journal_tokens=12, max_weight_lag=2)
    with Run(fast_path / "journal.sqlite", Shop, limited, engine=engine) as run:
        await run.collector.start(0)
        step, lease = 0, None
        while lease is None or lease.groups[0].id != 1:
            lease = await run.collector.lease(1, step=step + 1)
            step += 1
            await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
            engine.weight_version = weight_version(1, step)
            for _ in range(2 if step < 5 else 100):
                allowed.release()
            if step < 5:
                asked = 2 * step
                await until(lambda n=asked: sum(r.split(".")[2] == "1" for r, *_ in engine.requests) == n)
        await run.collector.stop()
    assert step > 5
    assert lease.max_weight_lag == 2
    batch = make_batch(lease.groups, step=step, max_weight_lag=lease.max_weight_lag, advantage_std=True)
    lags = np.concatenate([step - t.rows()[0].weight_versions % 1_000_000 for t in lease.groups[0].trajectories])
    sampled = np.concatenate([t.rows()[0].sampled for t in lease.groups[0].trajectories])
    assert len(set(lags[sampled].tolist())) >= 4
    assert 0 < lease.masked_tokens == int((lags[sampled] > 2).sum()) == batch.metrics["stale_tokens"]
    assert batch.metrics["trained_tokens"] == int((lags[sampled] <= 2).sum()) > 0
    assert staleness(lease.groups[0].trajectories, step)["staleness/max"] == lags[sampled].max() - 1


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_judge_that_takes_forever_holds_neither_step_nor_update_nor_stop_and_costs_no_token(
    fast_path: Path, asynchronous: bool
) -> None:
    forever, released, judged = asyncio.Event(), threading.Event(), []

    class Thoughtful(Shop):
        def _slow(self) -> bool:
            judged.append(self.episode_id)
            return self.episode_id.startswith("1.") and len(set(judged)) > 0 and not released.is_set()

        async def score_later(self, task: dict[str, Any], answer: str) -> Any:
            if self._slow():
                await forever.wait()
            return Shop.score(self, task, answer)

        def score_now(self, task: dict[str, Any], answer: str) -> Any:
            if self._slow():
                released.wait()
            return Shop.score(self, task, answer)

    kind = type("Judged", (Thoughtful,), {"score": Thoughtful.score_later if asynchronous else Thoughtful.score_now})
    path = fast_path / "journal.sqlite"
    with Run(path, kind, config(), engine=ScriptedEngine(shopper)) as run:
        await run.collector.start(0)
        await until(lambda: {"1.0.0", "1.1.0"} <= set(judged))
        async with asyncio.timeout(10):
            lease = await run.collector.lease(2, step=1)
            assert 1 not in {group.id for group in lease.groups}
            await run.ledger.commit_step(1, lease, ("step-1", "h"), {})
            await run.engine.pause()
            await run.engine.update_weights(Weights(1_000_001, None, lambda: ()))
            await run.engine.resume()
            await run.collector.stop()
    released.set()
    engine = ScriptedEngine(shopper)
    with Run(path, kind, config(), engine=engine) as run:
        await run.collector.start(1)
        ids: set[int] = set()
        while 1 not in ids:
            step = run.ledger.last_step().step + 1  # type: ignore[union-attr]
            lease = await run.collector.lease(2, step=step)
            await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
            ids |= {group.id for group in lease.groups}
        await run.collector.stop()
        assert 1 not in groups_asked(engine)
        assert not run.ledger.status().failures


async def test_an_episode_that_never_returns_holds_no_step_and_is_named(fast_path: Path) -> None:
    class Endless(Shop):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            if self.episode_id == "1.1.0":
                await asyncio.sleep(3600)
            self.total += number
            return str(self.total)

    path = fast_path / "journal.sqlite"
    with Run(path, Endless, config()) as run:
        await run.collector.start(0)
        async with asyncio.timeout(10):
            for step in (1, 2, 3, 4):
                lease = await run.collector.lease(2, step=step)
                assert 1 not in {group.id for group in lease.groups}
                await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
        status = read_status(path)
        longest = max(status.in_flight, key=lambda episode: episode.since)
        assert (longest.id, longest.waiting_for) == ("1.1.0", "tool add")
        assert "1.1.0 tool add turn 1" in " ".join(str(status).split())
        await run.collector.stop()


async def test_a_run_whose_episodes_all_fail_stops_with_the_first_cause(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 0.0)

    class Dead(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            raise KeyError("no such table")

    with Run(fast_path / "journal.sqlite", Dead, config(group_size=8, max_failed=0.2)) as run:
        await run.collector.start(0)
        with pytest.raises(EnvError, match=r"episodes failed.*rollout.max_failed = 0.2.*no such table"):
            async with asyncio.timeout(20):
                await run.collector.lease(2, step=1)
        await run.collector.stop()
        assert run.ledger.status().slots["failed"] > 40


async def test_stop_is_prompt_with_a_tool_and_a_request_that_hang_and_loses_no_token(fast_path: Path) -> None:
    class Hanging(Shop):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            await asyncio.sleep(3600)
            return ""

        async def aclose(self) -> None:
            await asyncio.sleep(3600)

    engine = ScriptedEngine(shopper, chunk=1)
    engine.hold_at = 330
    with Run(fast_path / "journal.sqlite", Hanging, config(group_size=4), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().generating + run.collector.progress().in_tools >= 16)
        await asyncio.sleep(0.05)
        before = time.monotonic()
        await run.collector.stop()
        assert time.monotonic() - before < 2.0
        journaled = run.journal.submit(
            lambda c: c.execute("SELECT sum(length(token_ids) / 4) FROM events WHERE kind = 'sampled'").fetchone()[0]
        ).result(5)
        delivered = sum(delivered for _, _, delivered in engine.requests)
        assert journaled == delivered > 0
        assert run.collector.progress().in_flight == 0
        await run.collector.stop()


async def test_stop_asks_for_no_more_tokens(fast_path: Path) -> None:
    engine = ScriptedEngine(shopper, chunk=1, delay=0.01)
    with Run(fast_path / "journal.sqlite", Shop, config(journal_tokens=4), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().generating == 8 and len(engine.requests) >= 8)
        ended = len(engine.requests)
        await run.collector.stop()
        assert len(engine.requests) <= ended + 8


async def test_stop_with_a_paused_engine_is_prompt(fast_path: Path) -> None:
    with Run(fast_path / "journal.sqlite", Shop, config()) as run:
        await run.engine.pause()
        await run.collector.start(0)
        await until(lambda: run.collector.progress().generating >= 8)
        before = time.monotonic()
        await run.collector.stop()
        assert time.monotonic() - before < 2.0


async def test_another_process_sees_what_every_episode_waits_for(fast_path: Path) -> None:
    class Waiting(Shop):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            await asyncio.sleep(3600)
            return ""

    path = fast_path / "journal.sqlite"
    engine = Slowly(shopper)
    engine.slow = {"2"}
    with Run(path, Waiting, config(over_provision=1.0), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().in_tools >= 2)
        await asyncio.sleep(0.05)
        code = "import sys; from gspo_agent.rollout.ledger import read_status; print(read_status(sys.argv[1]))"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(path), stdout=-1, stderr=-1)
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        text = output.decode()
        assert "running, life 1, step 0" in text
        assert "tool add 2" in text
        assert "tokens 2" in text
        status = read_status(path)
        assert Counter(e.waiting_for for e in status.in_flight) == {"tool add": 2, "tokens": 2}
        assert status.alive
        await run.collector.stop()
    assert not read_status(path).alive


async def test_a_broken_journal_reaches_whoever_waits_for_a_lease(fast_path: Path) -> None:
    with pytest.raises(JournalError, match="full"), Run(fast_path / "journal.sqlite", Shop, config()) as run:  # noqa: PT012
        nearly_fill(run.journal, 2)
        await run.collector.start(0)
        async with asyncio.timeout(10):
            await run.collector.lease(2, step=1)


async def test_sources_get_their_share_and_a_restart_decides_alike(fast_path: Path) -> None:
    def sources(run: Run) -> list[Any]:
        (first,) = run.collector._sources
        return [first, module.Source(first.factory, first.tasks, Limits(), weight=3.0)]

    path = fast_path / "journal.sqlite"
    for step in (1, 2):
        with Run(path, Shop, config(groups_per_step=4, over_provision=1.0)) as run:
            run.collector._sources = sources(run)
            await run.collector.start(step - 1)
            lease = await run.collector.lease(4, step=step)
            await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
            await run.collector.stop()
            cursors = run.ledger.cursors()
    assert cursors[1] / cursors[0] == pytest.approx(3.0, rel=0.35)


@pytest.mark.parametrize("expired", ["mask", "reroll"])
async def test_an_environment_that_closes_slowly_holds_no_group_back_and_mixes_up_no_lease(
    fast_path: Path, expired: str
) -> None:
    """A group is ready when its last member is scored, not when that one's environment is closed; what becomes known
    of it later is no news."""
    closing, closed = [], asyncio.Event()

    class Slow(Shop):
        async def close(self) -> None:
            if self.episode_id in ("1.0.0", "1.1.0"):
                closing.append(self.episode_id)
                await closed.wait()

    settings = config(groups_per_step=1, over_provision=1.0, expired=expired, max_weight_lag=2)
    with Run(fast_path / "journal.sqlite", Slow, settings) as run:
        await run.collector.start(0)
        await until(lambda: len(closing) == 2 and run.ledger.status().groups.get("ready") == 1)
        step = 1 if expired == "mask" else 7  # where it is played again
        async with asyncio.timeout(10):
            lease = await run.collector.lease(1, step=step)
        assert [group.id for group in lease.groups] == [1]
        assert {t.attempt for t in lease.groups[0].trajectories} == ({0} if expired == "mask" else {2})
        closed.set()
        await until(lambda: run.collector.progress().in_flight == 0)
        async with asyncio.timeout(10):
            following = await run.collector.lease(1, step=step + 1)
        assert [group.id for group in following.groups] == [2]
        await run.collector.stop()
