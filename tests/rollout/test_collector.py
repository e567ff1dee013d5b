"""Many episodes at once: what is unfinished is kept, what is finished is handed out once, and a stop is prompt."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import EnvError, JournalError
from gspo_agent.rollout import collector as module
from gspo_agent.rollout.ledger import read_status
from gspo_agent.testing import ScriptedEngine
from tests.rollout.scene import CHAT, Run, Shop, nearly_fill, play_to_the_end, shopper, until, view


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
    """The reward is what the task says, for every member."""

    def prompt(self, task: dict[str, Any]) -> str:
        return "go"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 1.0 if task["number"] % 3 else float(self.episode_id.split(".")[1])


def answerer(prompt: Sequence[int], seed: int) -> list[int]:
    return CHAT.turn("done")


async def test_flat_groups_are_filtered_with_the_step_and_bounded(fast_path: Path) -> None:
    with Run(fast_path / "a.sqlite", Fixed, config(filter_zero_variance=True), engine=ScriptedEngine(answerer)) as run:
        await run.collector.start(0)
        lease = await run.collector.lease(2, step=1)
        assert [group.task["number"] % 3 for group in lease.groups] == [0, 0]
        assert len(lease.filtered) >= 2
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
