"""Groups and slots: what an end, a failure, a fresh start or an expiry leads to."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.errors import JournalError
from gspo_agent.rollout import groups, schema
from gspo_agent.rollout.events import Ended
from gspo_agent.rollout.groups import Ending
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger, OpenGroup, Ready
from gspo_agent.trajectory import Status
from tests.rollout.moves import begin, create, end, finish, new_group, sample


@pytest.fixture
def ledger(fast_path: Path) -> Iterator[Ledger]:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        yield Ledger(journal)


async def test_rewards_that_differ_by_rounding_are_no_variance(ledger: Ledger) -> None:
    await finish(ledger, await create(ledger, new_group(0)), 1.0, 1.0 + 1e-9)
    await finish(ledger, await create(ledger, new_group(1)), 1.0, 1.1)
    assert ledger.ready() == [Ready(1, True), Ready(2, False)]


async def test_groups_that_are_created_together_are_all_there_in_order_or_none_of_them(ledger: Ledger) -> None:
    made = await ledger.create_groups([new_group(0), new_group(0, source=1), new_group(1)])
    assert [(group.id, group.source, group.task["n"]) for group in made] == [(1, 0, 0), (2, 1, 0), (3, 0, 1)]
    assert ledger.cursors() == {0: 2, 1: 1}
    with pytest.raises(JournalError, match="source 1 stands at task 1, not 5"):
        await ledger.create_groups([new_group(2), new_group(5, source=1)])
    assert ledger.cursors() == {0: 2, 1: 1}
    assert ledger.unfinished() == made


async def aged_group(ledger: Ledger, cursor: int, *steps: tuple[int, ...], max_attempts: int = 3) -> OpenGroup:
    """A ready group whose members hold tokens of these steps."""
    group = await create(ledger, new_group(cursor, size=len(steps))._replace(max_attempts=max_attempts))
    for slot, of in zip(group.slots, steps, strict=True):
        begin(ledger, slot)
        sample(ledger, slot, *of)
        end(ledger, slot, float(slot.number))
    return group


async def test_a_ready_group_tells_its_oldest_token_whoever_asks(ledger: Ledger) -> None:
    await aged_group(ledger, 0, (4, 6), (5,))
    assert ledger.ready() == [Ready(1, False, 4)]
    group = await create(ledger, new_group(1))
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
    group = await create(ledger, new_group(0)._replace(max_attempts=3))
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
    await create(ledger, new_group(0))
    with pytest.raises(JournalError, match="stands at task 1, not 0"):
        await create(ledger, new_group(0))
    assert ledger.cursors() == {0: 1}
    assert ledger.status().groups == {"open": 1}


async def test_a_reward_that_is_not_finite_never_reaches_a_group(ledger: Ledger) -> None:
    group = await create(ledger, new_group(0))
    begin(ledger, group.slots[0])
    with pytest.raises(JournalError, match="unscored"):
        end(ledger, group.slots[0], float("nan"))


async def test_a_group_without_enough_scored_members_is_given_up(ledger: Ledger) -> None:
    group = await create(ledger, new_group(0, size=3))
    await finish(ledger, group._replace(slots=group.slots[:1]), 1.0)
    for slot in group.slots[1:]:
        begin(ledger, slot)
        retry = end(ledger, slot, None).retry
        begin(ledger, retry)
        settled = end(ledger, retry, None)
        assert settled.retry is None
    assert settled.group_state == "given_up"
    query = "SELECT settled FROM groups WHERE state = 'given_up'"
    step = ledger._now(lambda c: c.execute(query).fetchall())
    assert step == [(1,)]  # it goes with the first step, which is being gathered
    assert ledger.status().failures == {"because": 4}


async def test_a_group_goes_with_the_members_that_were_scored(ledger: Ledger) -> None:
    group = await create(ledger, new_group(0, size=3))
    await finish(ledger, group._replace(slots=group.slots[:2]), 1.0, 0.0)
    begin(ledger, group.slots[2])
    retry = end(ledger, group.slots[2], None).retry
    begin(ledger, retry)
    assert end(ledger, retry, None).group_state == "ready"
    lease = await ledger.lease(1, 1, max_filtered=0)
    assert lease is not None
    assert [t.index for t in lease.groups[0].trajectories] == [0, 1]


WAYS = {
    "right": (Status.TERMINATED, 1.0),
    "wrong": (Status.TERMINATED, 0.0),
    "cut short": (Status.TRUNCATED, 0.25),
    "failed": (Status.FAILED, 0.0),
}


@contextmanager
def running(sizes: list[int]) -> Iterator[tuple[sqlite3.Connection, list[OpenGroup]]]:
    """A ledger in which every slot of these groups runs."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(schema.TABLES)
        made = groups.create_groups(connection, [new_group(n, size=size) for n, size in enumerate(sizes)])
        groups.begin(connection, [slot for group in made for slot in group.slots])
        yield connection, made


def ending(group: OpenGroup, number: int, way: str, step: int) -> Ending:
    status, reward = WAYS[way]
    return Ending(group.slots[number], Ended(status, "because", reward), reward, {step: 5, step + 1: 7})


def tables(connection: sqlite3.Connection) -> Any:
    slots = "SELECT id, group_id, number, attempt, state, reward, stop_reason, ended IS NULL, versions FROM slots"
    return [
        connection.execute(f"{query} ORDER BY id").fetchall()
        for query in (slots, "SELECT id, state, flat, ready, settled FROM groups")
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_ends_that_are_done_together_are_those_one_after_the_other(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 3), min_size=1, max_size=3))
    places = data.draw(st.permutations([(group, number) for group, size in enumerate(sizes) for number in range(size)]))
    ways = data.draw(st.lists(st.sampled_from(sorted(WAYS)), min_size=len(places), max_size=len(places)))
    number = data.draw(st.integers(1, len(places)))
    with running(sizes) as (together, made), running(sizes) as (alone, _):
        endings = [
            ending(made[group], n, way, step) for step, ((group, n), way) in enumerate(zip(places, ways, strict=True))
        ][:number]
        assert groups.end_all(together, endings) == [groups.end(alone, *one) for one in endings]
        assert tables(together) == tables(alone)


def test_however_many_end_together_no_statement_has_too_many_arguments() -> None:
    with running([600, 600]) as (connection, made):
        endings = [ending(group, number, "right", 1) for number in range(600) for group in made]
        settled = groups.end_all(connection, endings)
        assert [each.group_state for each in settled] == ["open"] * 1198 + ["ready"] * 2
        assert connection.execute("SELECT count(*) FROM slots WHERE state = 'done'").fetchone() == (1200,)


def test_what_is_not_running_cannot_end_nor_what_has_begun_begin() -> None:
    with running([2]) as (connection, (group,)):
        first, second = (ending(group, number, "right", 1) for number in (0, 1))
        groups.end_all(connection, [first])
        with pytest.raises(JournalError, match="only 1 were running"):
            groups.end_all(connection, [first, second])
        with pytest.raises(JournalError, match="only 0 were waiting"):
            groups.begin(connection, group.slots)
