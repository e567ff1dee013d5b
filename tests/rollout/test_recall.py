"""What is asked for together is read together, and nobody's damage is another's."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.errors import JournalError
from gspo_agent.rollout.events import Begun, Episode, Observed, Sampled
from gspo_agent.rollout.groups import Slot
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.recall import _MANY, Recall, _GarbagePause
from gspo_agent.trajectory import Segment

SLOTS = [Slot(number, 1, number - 1, 0, 10 * number, running=True) for number in (1, 2, 3)]


@pytest.fixture
def journal(fast_path: Path) -> Iterator[Journal]:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        for slot in SLOTS:
            segment = Segment([slot.id, 5], "policy", [-1.0, -2.0], 1_000_000)
            journal.append(slot.id, Begun(slot.seed, "shop", 0, 1))
            journal.append(slot.id, Observed(0, [{"role": "user", "content": "hi"}], [7, 8, 9]))
            journal.append(slot.id, Sampled(0, 3, [segment], "r", None))
        journal.flush()
        yield journal


async def test_episodes_asked_for_together_are_read_in_one_transaction(journal: Journal) -> None:
    recall, before = Recall(journal), journal.commits
    episodes = await asyncio.gather(*map(recall.episode, SLOTS))
    assert journal.commits == before + 1
    for slot, episode in zip(SLOTS, episodes, strict=True):
        assert episode.trajectory.id == slot.trajectory().id
        assert episode.trajectory.token_ids().tolist() == [7, 8, 9, slot.id, 5]
    again = await recall.episode(SLOTS[0])
    assert again is not episodes[0]
    assert again.trajectory.token_ids().tolist() == [7, 8, 9, 1, 5]


async def test_a_damaged_event_is_named_to_its_own_slot_and_the_others_come_back(journal: Journal) -> None:
    damage = "UPDATE events SET logprobs = x'00000000' WHERE slot = 2 AND kind = 'sampled'"
    await journal.transact(lambda connection: connection.execute(damage))
    found = await asyncio.gather(*map(Recall(journal).episode, SLOTS), return_exceptions=True)
    assert [type(each) for each in found] == [Episode, JournalError, Episode]
    assert "event 6 (sampled) of slot 2 is damaged" in str(found[1])


@pytest.mark.parametrize(
    "data", [b"1", b"null", b'"x"', b"[]", b"{}", b"[0, 0, [], 0, 0, 0, 7]", b'{"step":1,"messages":7}']
)
async def test_whatever_a_row_has_become_it_is_its_own_slots_damage_alone(journal: Journal, data: bytes) -> None:
    damage = "UPDATE events SET data = ? WHERE slot = 2 AND kind != 'begun'"
    await journal.transact(lambda connection: connection.execute(damage, (data,)))
    found = await asyncio.gather(*map(Recall(journal).episode, SLOTS), return_exceptions=True)
    assert [type(each) for each in found] == [Episode, JournalError, Episode]
    assert "is damaged" in str(found[1]) or "1.1.0 are damaged" in str(found[1])


async def test_whoever_stops_waiting_costs_the_others_nothing(journal: Journal) -> None:
    recall = Recall(journal)
    tasks = [asyncio.create_task(recall.episode(slot)) for slot in SLOTS]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in found] == [Episode, asyncio.CancelledError, Episode]


async def test_a_journal_that_failed_is_told_to_everyone(journal: Journal) -> None:
    journal.close()
    found = await asyncio.gather(*map(Recall(journal).episode, SLOTS), return_exceptions=True)
    assert [str(each) for each in found] == [f"{journal.path} is closed"] * 3


async def test_the_garbage_collector_rests_until_all_who_were_woken_wait_again(journal: Journal) -> None:
    recall, rests = Recall(journal), []

    async def go_on(slot: Slot) -> None:
        await recall.episode(slot)
        rests.append(not gc.isenabled())
        await asyncio.sleep(0)
        rests.append(not gc.isenabled())

    assert gc.isenabled()
    await asyncio.gather(*map(go_on, SLOTS))
    assert rests == [True] * 3 + [False] * 3


@pytest.mark.parametrize("enabled", [True, False])
async def test_the_garbage_collector_is_left_as_it_was(journal: Journal, enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        await Recall(journal).episode(SLOTS[0])
        await asyncio.sleep(0)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


class Node:
    """May be its own neighbour, and is garbage then that only the collector finds."""

    neighbour: Any = None


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_made_in_a_pause_is_old_at_once_and_still_collected(frozen: bool) -> None:
    gc.collect()
    if frozen:  # by whoever runs this process, and that stays so
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        pause = _GarbagePause()
        kept, node = [[] for _ in range(2 * _MANY)], Node()
        node.neighbour, gone = node, weakref.ref(node)
        del node
        pause.end()
        assert gc.get_freeze_count() == before
        assert any(each is kept for each in gc.get_objects(generation=2)) is not frozen
        assert gone() is not None or frozen
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()


def test_after_a_short_pause_the_young_stay_young() -> None:
    gc.collect()
    pause, kept = _GarbagePause(), [[]]
    pause.end()
    assert not any(each is kept for each in gc.get_objects(generation=2))


def test_an_event_loop_that_ends_too_early_leaves_the_garbage_collector_at_work(journal: Journal) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(Recall(journal).episode(SLOTS[0]))
    for _ in range(2):  # asked, and given to the writer; nothing hears of the answer
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert not gc.isenabled()
    task.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    journal.flush()
    assert gc.isenabled()
