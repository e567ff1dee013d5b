"""The ledger: nothing lost, nothing trained twice, whatever the order of ends, leases, commits and restarts."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gspo_agent.errors import JournalError
from gspo_agent.rollout.events import Begun, Ended, Sampled
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.leases import Ready, choose
from gspo_agent.rollout.ledger import Lease, Ledger, NewGroup, OpenGroup, Slot, read_last_step, read_steps
from gspo_agent.trajectory import Segment, Status, weight_version


def new_group(cursor: int, *, size: int = 2, source: int = 0) -> NewGroup:
    return NewGroup(source, cursor, "shop", {"n": cursor}, size, max_attempts=2, min_group=2, seed=7)


def end(ledger: Ledger, slot: Slot, reward: float | None) -> Any:
    """Ends a slot; None fails it."""
    status = Status.FAILED if reward is None else Status.TERMINATED
    score = None if reward is None else reward
    return ledger.end(slot, Ended(status, "because", score), reward or 0.0).result(5)


def begin(ledger: Ledger, slot: Slot) -> None:
    ledger.begin(slot, Begun(slot.seed, "shop", slot.attempt, 1)).result(5)


def sample(ledger: Ledger, slot: Slot, *steps: int, offset: int = 0) -> None:
    """Three tokens at each step's weights."""
    for n, step in enumerate(steps):
        segment = Segment([1, 2, 3], "policy", [-1.0] * 3, weight_version(ledger._journal.life, step))
        ledger._journal.append(slot.id, Sampled(0, offset + 3 * n, [segment], "r", None))


async def finish(ledger: Ledger, group: OpenGroup, *rewards: float) -> None:
    for slot, reward in zip(group.slots, rewards, strict=True):
        begin(ledger, slot)
        end(ledger, slot, reward)


class LedgerMachine(RuleBasedStateMachine):
    """Random histories of a run. The model: which groups were taken, and which steps a checkpoint covers."""

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None)
        self.path = Path(self.directory.name) / "journal.sqlite"
        self.loop = asyncio.new_event_loop()
        self.journal = Journal.open(self.path)
        self.ledger = Ledger(self.journal)
        self.created = 0
        self.step = self.covered = 0
        self.trained: dict[int, list[int]] = {}
        """Step -> groups it trained on, of the surviving lineage."""
        self.leased: dict[int, tuple[list[int], list[int]]] = {}
        """Step -> (groups, filtered) as first leased."""
        self.given_up: set[int] = set()
        self.lease: Lease | None = None

    def slots(self) -> list[Slot]:
        return [slot for group in self.ledger.unfinished() for slot in group.slots]

    @rule(size=st.integers(2, 3))
    def create(self, size: int) -> None:
        group = self.loop.run_until_complete(self.ledger.create_group(new_group(self.created, size=size)))
        assert group.id == self.created + 1
        self.created += 1

    @rule(pick=st.integers(0, 100), reward=st.sampled_from([None, 0.0, 1.0, 1.0 + 1e-9]))
    def play(self, pick: int, reward: float | None) -> None:
        slots = self.slots()
        if not slots:
            return
        slot = slots[pick % len(slots)]
        if not slot.running:
            begin(self.ledger, slot)
        settled = end(self.ledger, slot, reward)
        if settled.group_state == "given_up":
            self.given_up.add(slot.group_id)
        if reward is None and settled.retry is not None:
            assert settled.retry.attempt == slot.attempt + 1

    @rule(pick=st.integers(0, 100))
    def begin_one(self, pick: int) -> None:
        waiting = [slot for slot in self.slots() if not slot.running]
        if waiting:
            begin(self.ledger, waiting[pick % len(waiting)])

    @rule(pick=st.integers(0, 100))
    def begin_again(self, pick: int) -> None:
        running = [slot for slot in self.slots() if slot.running]
        if running:
            settled = self.ledger.restart(running[pick % len(running)], "no state").result(5)
            assert settled.retry is not None

    @rule(num_groups=st.integers(1, 3), max_filtered=st.integers(0, 2))
    def take(self, num_groups: int, max_filtered: int) -> None:
        step = self.step + 1
        lease = self.loop.run_until_complete(
            self.ledger.lease(step, num_groups, max_filtered=max_filtered, max_weight_lag=3)
        )
        if lease is None:
            assert step not in self.leased
            return
        ids = ([group.id for group in lease.groups], [group.id for group in lease.filtered])
        assert self.leased.setdefault(step, ids) == ids
        self.lease = lease

    @precondition(lambda self: self.lease is not None)
    @rule(checkpoint=st.booleans())
    def commit(self, checkpoint: bool) -> None:
        assert self.lease is not None
        self.step += 1
        name = (f"step-{self.step}", "hash") if checkpoint else None
        self.loop.run_until_complete(self.ledger.commit_step(self.step, self.lease, name, {"loss": 1.0}))
        self.trained[self.step] = [group.id for group in self.lease.groups]
        self.lease = None
        if checkpoint:
            self.covered = self.step

    @rule()
    def restart(self) -> None:
        before = self.slots()
        self.journal.close()
        self.journal = Journal.open(self.path)
        self.ledger = Ledger(self.journal)
        last = self.ledger.last_step()
        assert (last.step if last else 0) == self.covered
        assert self.slots() == before
        for step in range(self.covered + 1, self.step + 1):
            del self.trained[step]
        self.step, self.lease = self.covered, None
        assert self.ledger.pending_leases() == sorted(step for step in self.leased if step > self.covered)

    @invariant()
    def every_task_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        status = self.ledger.status()
        assert sum(status.groups.values()) == self.created
        assert self.ledger.cursors().get(0, 0) == self.created
        trained = [group for groups in self.trained.values() for group in groups]
        assert len(trained) == len(set(trained))
        covered = [step for step in self.leased if step <= self.covered]
        assert status.groups.get("consumed", 0) == sum(len(self.leased[step][0]) for step in covered)
        assert status.groups.get("filtered", 0) == sum(len(self.leased[step][1]) for step in covered)
        uncovered = [step for step in self.leased if step > self.covered]
        assert status.groups.get("leased", 0) == sum(len(group) for step in uncovered for group in self.leased[step])
        assert status.groups.get("given_up", 0) == len(self.given_up)
        open_groups = {slot.group_id for slot in self.slots()}
        assert status.groups.get("open", 0) == len(open_groups)

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.loop.close()
            self.directory.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_choose_leaves_out_flat_groups_up_to_the_bound() -> None:
    ready = [Ready(1, True), Ready(2, False), Ready(3, True), Ready(4, True), Ready(5, False), Ready(6, False)]
    assert choose(ready, 2, 10) == [(1, True), (2, False), (3, True), (4, True), (5, False)]
    assert choose(ready, 2, 1) == [(1, True), (2, False), (3, False)]
    assert choose(ready, 2, 0) == [(1, False), (2, False)]
    assert choose(ready, 4, 10) is None


@pytest.fixture
def ledger(fast_path: Path) -> Any:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        yield Ledger(journal)


async def test_rewards_that_differ_by_rounding_are_no_variance(ledger: Ledger) -> None:
    await finish(ledger, await ledger.create_group(new_group(0)), 1.0, 1.0 + 1e-9)
    await finish(ledger, await ledger.create_group(new_group(1)), 1.0, 1.1)
    assert ledger.ready() == [Ready(1, True), Ready(2, False)]


async def test_a_lease_is_recorded_in_the_order_in_which_groups_finished(ledger: Ledger) -> None:
    groups = [await ledger.create_group(new_group(n)) for n in range(3)]
    for group in (groups[2], groups[0], groups[1]):
        await finish(ledger, group, 0.0, 1.0)
    lease = await ledger.lease(1, 2, max_filtered=0)
    assert lease is not None
    assert [group.id for group in lease.groups] == [3, 1]
    assert [group.task for group in lease.groups] == [{"n": 2}, {"n": 0}]


async def test_the_age_limit_is_stored_with_the_lease(ledger: Ledger) -> None:
    group = await ledger.create_group(new_group(0))
    for slot, step in zip(group.slots, (0, 1), strict=True):
        begin(ledger, slot)
        sample(ledger, slot, step)
        end(ledger, slot, float(step))
    lease = await ledger.lease(5, 1, max_filtered=0, max_weight_lag=4)
    assert lease is not None
    assert (lease.max_weight_lag, lease.masked_tokens) == (4, 3)
    again = await ledger.lease(5, 1, max_filtered=0, max_weight_lag=100)
    assert again is not None
    assert (again.max_weight_lag, again.masked_tokens) == (4, 3)


async def aged_group(ledger: Ledger, cursor: int, *steps: tuple[int, ...], max_attempts: int = 3) -> OpenGroup:
    """A ready group whose members hold tokens of these steps."""
    group = await ledger.create_group(new_group(cursor, size=len(steps))._replace(max_attempts=max_attempts))
    for slot, of in zip(group.slots, steps, strict=True):
        begin(ledger, slot)
        sample(ledger, slot, *of)
        end(ledger, slot, float(slot.number))
    return group


async def test_a_ready_group_tells_its_oldest_token_whoever_asks(ledger: Ledger) -> None:
    await aged_group(ledger, 0, (4, 6), (5,))
    assert ledger.ready() == [Ready(1, False, 4)]
    group = await ledger.create_group(new_group(1))
    sample(ledger, group.slots[0], 2)
    begin(ledger, group.slots[0])
    end(ledger, group.slots[0], 0.0)
    begin(ledger, group.slots[1])
    assert end(ledger, group.slots[1], 1.0).ready == Ready(2, False, 2)
    rows = ledger._now(lambda c: c.execute("SELECT versions FROM slots ORDER BY id").fetchall())
    assert [orjson.loads(versions) for (versions,) in rows] == [{"4": 3, "6": 3}, {"5": 3}, {"2": 3}, {}]


async def test_expired_members_alone_are_played_again(ledger: Ledger) -> None:
    await aged_group(ledger, 0, (4, 6), (5, 6), (3,))
    await aged_group(ledger, 1, (9,), (9,))
    assert await ledger.expire(7, 4) == []
    (group,) = await ledger.expire(9, 4)
    assert [(slot.number, slot.attempt, slot.running) for slot in group.slots] == [(0, 1, False), (2, 1, False)]
    assert group.task == {"n": 0}
    assert ledger.unfinished() == [group]
    assert [ready.id for ready in ledger.ready()] == [2]
    assert await ledger.expire(9, 4) == []
    for slot in group.slots:
        begin(ledger, slot)
        sample(ledger, slot, 8)
        settled = end(ledger, slot, 1.0)
    assert settled.ready == Ready(1, True, 5)
    lease = await ledger.lease(9, 2, max_filtered=0, max_weight_lag=4)
    assert lease is not None
    assert [[(t.index, t.attempt) for t in group.trajectories] for group in lease.groups] == [
        [(0, 0), (1, 0)], [(0, 1), (1, 0), (2, 1)]
    ]  # fmt: skip
    assert lease.masked_tokens == 0


async def test_failed_and_expired_attempts_together_have_one_limit_and_then_the_tokens_are_masked(
    ledger: Ledger,
) -> None:
    group = await ledger.create_group(new_group(0)._replace(max_attempts=3))
    begin(ledger, group.slots[0])
    retry = end(ledger, group.slots[0], None).retry
    assert retry is not None
    for slot in (retry, group.slots[1]):
        begin(ledger, slot)
        sample(ledger, slot, 1)
        end(ledger, slot, float(slot.number))
    (again,) = await ledger.expire(9, 4)
    assert [(slot.number, slot.attempt) for slot in again.slots] == [(0, 2), (1, 1)]
    for slot in again.slots:
        begin(ledger, slot)
        sample(ledger, slot, 2)
        settled = end(ledger, slot, float(slot.number))
    # The first member is out of attempts; the other may be played once more.
    assert settled.ready == Ready(1, False, 2)
    (again,) = await ledger.expire(9, 4)
    assert [(slot.number, slot.attempt) for slot in again.slots] == [(1, 2)]
    begin(ledger, again.slots[0])
    sample(ledger, again.slots[0], 3)
    assert end(ledger, again.slots[0], 1.0).ready == Ready(1, False, None)
    assert await ledger.expire(100, 4) == []
    lease = await ledger.lease(9, 1, max_filtered=0, max_weight_lag=4)
    assert lease is not None
    assert lease.masked_tokens == 6


async def test_an_expired_member_counts_again_where_its_later_attempts_all_failed(ledger: Ledger) -> None:
    await aged_group(ledger, 0, (1,), (9,), max_attempts=2)
    (group,) = await ledger.expire(9, 4)
    (slot,) = group.slots
    begin(ledger, slot)
    settled = end(ledger, slot, None)
    assert settled == (None, "ready", Ready(1, False, 9))
    lease = await ledger.lease(9, 1, max_filtered=0, max_weight_lag=4)
    assert lease is not None
    assert [(t.index, t.attempt) for t in lease.groups[0].trajectories] == [(0, 0), (1, 0)]
    assert lease.masked_tokens == 3


async def test_a_cursor_cannot_be_moved_twice(ledger: Ledger) -> None:
    await ledger.create_group(new_group(0))
    with pytest.raises(JournalError, match="stands at task 1, not 0"):
        await ledger.create_group(new_group(0))
    assert ledger.cursors() == {0: 1}
    assert ledger.status().groups == {"open": 1}


async def test_what_cannot_follow_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    group = await ledger.create_group(new_group(0))
    with pytest.raises(JournalError, match="is not running"):
        end(ledger, group.slots[0], 1.0)
    await finish(ledger, group, 0.0, 1.0)
    lease = await ledger.lease(1, 1, max_filtered=0)
    assert lease is not None
    with pytest.raises(JournalError, match="was leased groups"):
        await ledger.commit_step(2, lease)
    other = Lease(1, [], [], None, 0)
    with pytest.raises(JournalError, match=r"was leased groups \[1\], not \[\]"):
        await ledger.commit_step(1, other)
    await ledger.commit_step(1, lease, ("step-1", "hash"))
    with pytest.raises(JournalError, match="is committed"):
        await ledger.lease(1, 1, max_filtered=0)
    assert ledger.status().groups == {"consumed": 1}


async def test_a_reward_that_is_not_finite_never_reaches_a_group(ledger: Ledger) -> None:
    group = await ledger.create_group(new_group(0))
    begin(ledger, group.slots[0])
    with pytest.raises(JournalError, match="unscored"):
        end(ledger, group.slots[0], float("nan"))


async def test_a_group_without_enough_scored_members_is_given_up(ledger: Ledger) -> None:
    group = await ledger.create_group(new_group(0, size=3))
    await finish(ledger, group._replace(slots=group.slots[:1]), 1.0)
    for slot in group.slots[1:]:
        begin(ledger, slot)
        retry = end(ledger, slot, None).retry
        begin(ledger, retry)
        settled = end(ledger, retry, None)
        assert settled.retry is None
    assert settled.group_state == "given_up"
    assert ledger.status().failures == {"because": 4}


async def test_a_group_goes_with_the_members_that_were_scored(ledger: Ledger) -> None:
    group = await ledger.create_group(new_group(0, size=3))
    await finish(ledger, group._replace(slots=group.slots[:2]), 1.0, 0.0)
    begin(ledger, group.slots[2])
    retry = end(ledger, group.slots[2], None).retry
    begin(ledger, retry)
    assert end(ledger, retry, None).group_state == "ready"
    lease = await ledger.lease(1, 1, max_filtered=0)
    assert lease is not None
    assert [t.index for t in lease.groups[0].trajectories] == [0, 1]


async def test_steps_since_the_last_checkpoint_are_done_again_in_the_recorded_order(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        for n in range(4):
            await finish(ledger, await ledger.create_group(new_group(n)), 0.0, 1.0)
        for step in (1, 2, 3):
            lease = await ledger.lease(step, 1, max_filtered=0)
            assert lease is not None
            await ledger.commit_step(step, lease, ("step-1", "h") if step == 1 else None, {"x": step})
        assert ledger.status().groups == {"consumed": 1, "leased": 2, "ready": 1}
        assert [step for step, _ in read_steps(path)] == [1, 2, 3]
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        assert read_steps(path) == [(1, {"x": 1})]
        assert ledger.pending_leases() == [2, 3]
        for step, group in ((2, 2), (3, 3), (4, 4)):
            lease = await ledger.lease(step, 1, max_filtered=0)
            assert lease is not None
            assert [g.id for g in lease.groups] == [group]
            await ledger.commit_step(step, lease, ("step-4", "h") if step == 4 else None, {})
        assert ledger.status().groups == {"consumed": 4}
    last = read_last_step(path)
    assert last is not None
    assert (last.step, last.checkpoint, last.life) == (4, "step-4", 2)


async def test_a_roll_back_trains_the_same_groups_again_in_the_recorded_order(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        for n in range(6):
            await finish(ledger, await ledger.create_group(new_group(n)), 0.0, 1.0)
        for step, num_groups in ((1, 1), (2, 2), (3, 1)):
            lease = await ledger.lease(step, num_groups, max_filtered=0)
            assert lease is not None
            await ledger.commit_step(step, lease, (f"step-{step}", "h") if step != 2 else None)
        with pytest.raises(JournalError, match="this process has trained steps after 1 itself"):
            await ledger.roll_back(1)
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        with pytest.raises(JournalError, match="step 2 has no checkpoint"):
            await ledger.roll_back(2)
        await ledger.roll_back(1)
        assert [step for step, _ in read_steps(path)] == [1]
        assert ledger.pending_leases() == [2, 3]
        assert ledger.status().groups == {"consumed": 1, "leased": 3, "ready": 2}
        for step, ids in ((2, [2, 3]), (3, [4])):
            lease = await ledger.lease(step, 9, max_filtered=0)
            assert lease is not None
            assert [group.id for group in lease.groups] == ids
            await ledger.commit_step(step, lease, (f"step-{step}", "h"))
        assert ledger.status().groups == {"consumed": 4, "ready": 2}
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        await ledger.roll_back(0)
        assert (ledger.last_step(), ledger.pending_leases()) == (None, [1, 2, 3])
