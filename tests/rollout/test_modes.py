"""sync, carry_over and async are one collector; and what becomes of tokens that grew too old in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.config import RolloutConfig
from gspo_agent.engine.base import Weights
from gspo_agent.rollout.ledger import Lease
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import weight_version
from tests.rollout.scene import Run, Shop, sampled_again, shopper, until, view


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(
        **{"group_size": 2, "groups_per_step": 2, "over_provision": 2.0, "filter_zero_variance": False, **changes}
    )


class Gated(ScriptedEngine):
    """Requests of groups that are in `held_back` wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held_back: set[int] = set()
        self.order: list[tuple[int, int]] = []
        """(group, member) of every request, in the order in which they came."""
        self.at_once, self.most = 0, 0

    async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
        group, member = map(int, request_id.split(".")[2:4])
        self.order.append((group, member))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self._live.add(request_id)
        while group in self.held_back and request_id not in self._aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._live.discard(request_id)
        try:
            return await super().generate(token_ids, sampling, request_id=request_id)
        finally:
            self.at_once -= 1


def versions(lease: Lease) -> set[int]:
    return {s.weight_version for g in lease.groups for t in g.trajectories for s in t.segments if s.sampled}  # type: ignore[misc]


async def commit(run: Run, step: int, lease: Lease) -> None:
    """The step is trained and its weights are published, without a pause."""
    await run.ledger.commit_step(step, lease, (f"step-{step}", "h"), {})
    await run.engine.update_weights(Weights(weight_version(1, step), None, lambda: ()))


async def test_in_sync_mode_groups_begin_with_the_lease_that_gets_them(fast_path: Path) -> None:
    with Run(fast_path / "journal.sqlite", Shop, config(mode="sync"), engine=Gated(shopper)) as run:
        await run.collector.start(0)
        await asyncio.sleep(0.02)
        assert not run.ledger.cursors()
        for step in (1, 2, 3):
            lease = await run.collector.lease(2, step=step)
            assert sorted(group.id for group in lease.groups) == [2 * step - 1, 2 * step]
            assert run.ledger.cursors() == {0: 2 * step}
            await asyncio.sleep(0.02)
            progress = run.collector.progress()
            assert (progress.in_flight, progress.ready_groups, progress.open_groups) == (0, 0, 0)
            assert versions(lease) == {weight_version(1, step - 1) if step > 1 else 0}
            await commit(run, step, lease)
        await run.collector.stop()


async def test_in_sync_mode_a_restart_goes_on_with_the_step_it_was_in(fast_path: Path) -> None:
    path, engine = fast_path / "journal.sqlite", Gated(shopper)
    engine.held_back = {2}
    with Run(path, Shop, config(mode="sync"), engine=engine) as run:
        await run.collector.start(0)
        waiting = asyncio.create_task(run.collector.lease(2, step=1))
        await until(lambda: run.collector.progress().ready_groups == 1)
        await run.collector.stop()
        with pytest.raises(RuntimeError, match="not running"):
            await waiting
    with Run(path, Shop, config(mode="sync")) as run:
        await run.collector.start(0)
        lease = await run.collector.lease(2, step=1)
        assert sorted(group.id for group in lease.groups) == [1, 2]
        assert run.ledger.cursors() == {0: 2}
        await run.collector.stop()
    assert not sampled_again(path)


@pytest.mark.parametrize("mode", ["carry_over", "async"])
async def test_what_is_unfinished_goes_on_under_the_next_weights(fast_path: Path, mode: str) -> None:
    engine = Gated(shopper, weight_version=7)
    engine.held_back = {1, 3}
    with Run(fast_path / "journal.sqlite", Shop, config(mode=mode), engine=engine) as run:
        await run.collector.start(0)
        first = await run.collector.lease(2, step=1)
        assert sorted(group.id for group in first.groups) == [2, 4]
        if mode == "carry_over":
            await run.collector.pause()
        await commit(run, 1, first)
        await run.collector.resume()
        engine.held_back = set()
        seen: dict[int, set[int]] = {}
        for step in (2, 3):
            lease = await run.collector.lease(2, step=step)
            for group in lease.groups:
                seen[group.id] = {s.weight_version for t in group.trajectories for s in t.segments if s.sampled}  # type: ignore[misc]
            await commit(run, step, lease)
        assert seen[1] | seen[3] <= {weight_version(1, 1), weight_version(1, 2)}
        await run.collector.stop()


async def test_while_the_engine_is_paused_no_token_comes_and_afterwards_all_do(fast_path: Path) -> None:
    with Run(fast_path / "journal.sqlite", Shop, config(), engine=ScriptedEngine(shopper, chunk=1)) as run:
        await run.collector.start(0)
        await until(lambda: run.engine.requests)
        await run.collector.pause()
        await asyncio.sleep(0.01)
        tokens = run.collector.progress().tokens
        await asyncio.sleep(0.05)
        assert run.collector.progress().tokens == tokens
        await run.collector.resume()
        await run.collector.resume()
        assert await run.collector.lease(2, step=1)
        await run.collector.stop()


@pytest.mark.parametrize("expired", ["mask", "reroll", "keep"])
async def test_tokens_over_the_age_limit_are_masked_rerolled_or_kept(fast_path: Path, expired: str) -> None:
    """Group 1 is finished under weights 0 and stays behind for five steps; the limit is two."""
    engine = Gated(shopper)
    with Run(fast_path / "journal.sqlite", Shop, config(max_weight_lag=2, expired=expired), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().ready_groups == 4)
        asked = len(engine.requests)
        lease = await run.collector.lease(2, step=5)
        old = {1, 2, 3, 4} & {group.id for group in lease.groups}
        assert old == {group.id for group in lease.groups}
        tokens = sum(t.num_sampled for group in lease.groups for t in group.trajectories)
        attempts = {t.attempt for group in lease.groups for t in group.trajectories}
        if expired == "reroll":
            # Under weights that are as old, they stay too old: two more attempts, then masked.
            assert attempts == {2}
            assert lease.masked_tokens == tokens
            assert len({request.split(".")[2] for request, *_ in engine.requests[asked:]} - {"1", "2", "3", "4"}) <= 4
        else:
            assert attempts == {0}
            assert lease.masked_tokens == (tokens if expired == "mask" else 0)
        assert lease.max_weight_lag == (None if expired == "keep" else 2)
        await run.collector.stop()


async def test_only_the_expired_members_are_played_again_and_the_others_sample_nothing(fast_path: Path) -> None:
    """Of group 1, member 0 ends under weights 0 and member 1 under weights 4."""
    late = asyncio.Event()

    class OneLate(ScriptedEngine):
        async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
            if ".1.1.0-" in request_id:
                await late.wait()
            return await super().generate(token_ids, sampling, request_id=request_id)

    path, engine = fast_path / "journal.sqlite", OneLate(shopper)
    settings = config(groups_per_step=1, over_provision=1.0, max_weight_lag=2, expired="reroll")
    with Run(path, Shop, settings, engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.ledger.status().slots == {"done": 1, "running": 1})
        await engine.update_weights(Weights(weight_version(1, 4), None, lambda: ()))
        late.set()
        async with asyncio.timeout(20):
            lease = await run.collector.lease(1, step=5)
        (group,) = lease.groups
        assert [(t.index, t.attempt) for t in group.trajectories] == [(0, 1), (1, 0)]
        assert versions(lease) == {weight_version(1, 4)}
        assert lease.masked_tokens == 0
        asked = {request.partition("-")[0].split(".", 2)[2] for request, *_ in engine.requests}
        assert {episode for episode in asked if episode.startswith("1.")} == {"1.0.0", "1.1.0", "1.0.1"}
        assert run.ledger.status().slots["expired"] == 1
        await run.collector.stop()
    assert not sampled_again(path)
    with Run(path, Shop, settings) as run:  # what is read back is what was handed out
        await run.collector.start(4)
        async with asyncio.timeout(20):
            read = await run.collector.lease(1, step=5)
        assert [view(t, versions=True) for t in read.groups[0].trajectories] == [
            view(t, versions=True) for t in group.trajectories
        ]
        await run.collector.stop()


async def test_no_more_episodes_are_in_flight_than_allowed_and_older_groups_come_first(fast_path: Path) -> None:
    engine = Gated(shopper)
    with Run(fast_path / "journal.sqlite", Shop, config(max_in_flight=3, group_size=4), engine=engine) as run:
        await run.collector.start(0)
        assert await run.collector.lease(2, step=1)
        await until(lambda: run.collector.progress().ready_groups == 4)
        await run.collector.stop()
        assert engine.most <= 3
        query = (
            "SELECT group_id, number FROM events JOIN slots ON slots.id = slot WHERE kind = 'begun' ORDER BY events.id"
        )
        begun = run.journal.submit(lambda c: c.execute(query).fetchall()).result(5)
        assert begun == sorted(begun)
        assert len(begun) == 24


async def test_a_restart_plays_what_had_begun_before_what_had_not(fast_path: Path) -> None:
    """Two members of group 2 had begun when the run was cut; group 1 has one that waits for another attempt."""
    path = fast_path / "journal.sqlite"
    failing = asyncio.Event()

    class Once(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            if self.episode_id == "1.0.0":
                failing.set()
                raise ConnectionError("gone")
            super().setup(task)

    engine = Gated(shopper)
    engine.held_back = {1, 2}
    with Run(path, Once, config(max_in_flight=4, over_provision=1.0), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: failing.is_set() and run.collector.progress().generating == 3)
        await run.collector.stop()
        waiting = [slot for group in run.ledger.unfinished() for slot in group.slots if not slot.running]
        assert [(slot.group_id, slot.number) for slot in waiting] == [(1, 0)]
    engine = Gated(shopper)
    engine.held_back = {1, 2}
    with Run(path, Once, config(max_in_flight=3, over_provision=1.0), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().generating == 3)
        assert run.collector.progress().waiting == 1
        assert sorted(engine.order) == [(1, 1), (2, 0), (2, 1)]
        engine.held_back = set()
        assert await run.collector.lease(2, step=1)
        await run.collector.stop()


async def test_a_place_is_free_while_a_failed_member_waits_for_its_next_attempt(fast_path: Path) -> None:
    class Once(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            if self.episode_id.endswith(".0.0") and self.episode_id.startswith("1."):
                raise ConnectionError("gone")
            super().setup(task)

    with Run(fast_path / "journal.sqlite", Once, config(max_in_flight=1)) as run:
        await run.collector.start(0)
        await until(lambda: run.collector.progress().ready_groups >= 1)
        assert run.ledger.status().slots["failed"] == 1
        await run.collector.stop()


async def test_requests_of_a_dead_life_are_ended_at_the_start_and_no_other(fast_path: Path) -> None:
    path, engine = fast_path / "journal.sqlite", ScriptedEngine(shopper)
    engine.hold_at = 0
    with Run(path, Shop, config(), engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: len(engine.held) == 8)
        prefix = f"{run.journal.run_id}."
        assert all(request.startswith(prefix) for request in engine.held)
        # As a kill leaves it: the engine, elsewhere, goes on with them.
        orphans = set(engine.held)
        for task in list(run.collector._tasks):
            task.cancel()
    await until(lambda: not engine.held)
    engine._live |= orphans
    foreign = asyncio.create_task(engine.generate([*b"x", 258], _sampling(), request_id=f"{prefix[:-1]}1.1.1-1/"))
    await until(lambda: len(engine.held) == 1)
    with Run(path, Shop, config(), engine=engine) as run:
        await run.collector.start(0)
        assert engine._aborted == orphans
        await run.collector.stop()
    assert not foreign.done()
    foreign.cancel()


def _sampling() -> Any:
    from gspo_agent.engine.base import Sampling

    return Sampling(5)
