"""Leases: what a step gets stays what it gets, until a checkpoint covers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_agent.errors import JournalError
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.leases import choose
from gspo_agent.rollout.ledger import Lease, Ledger, Ready, read_last_step, read_steps
from tests.rollout.moves import begin, create, end, finish, new_group, sample


@pytest.fixture
def ledger(fast_path: Path) -> Iterator[Ledger]:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        yield Ledger(journal)


def test_choose_leaves_out_flat_groups_up_to_the_bound() -> None:
    ready = [Ready(1, True), Ready(2, False), Ready(3, True), Ready(4, True), Ready(5, False), Ready(6, False)]
    assert choose(ready, 2, 10) == [(1, True), (2, False), (3, True), (4, True), (5, False)]
    assert choose(ready, 2, 1) == [(1, True), (2, False), (3, False)]
    assert choose(ready, 2, 0) == [(1, False), (2, False)]
    assert choose(ready, 4, 10) is None


async def test_a_lease_is_recorded_in_the_order_in_which_groups_finished(ledger: Ledger) -> None:
    groups = [await create(ledger, new_group(n)) for n in range(3)]
    for group in (groups[2], groups[0], groups[1]):
        await finish(ledger, group, 0.0, 1.0)
    lease = await ledger.lease(1, 2, max_filtered=0)
    assert lease is not None
    assert [group.id for group in lease.groups] == [3, 1]
    assert [group.task for group in lease.groups] == [{"n": 2}, {"n": 0}]


async def test_the_age_limit_is_stored_with_the_lease(ledger: Ledger) -> None:
    group = await create(ledger, new_group(0))
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


async def test_what_cannot_follow_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    group = await create(ledger, new_group(0))
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


async def test_steps_since_the_last_checkpoint_are_done_again_in_the_recorded_order(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        for n in range(4):
            await finish(ledger, await create(ledger, new_group(n)), 0.0, 1.0)
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
            await finish(ledger, await create(ledger, new_group(n)), 0.0, 1.0)
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
