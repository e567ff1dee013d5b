"""Who has what: groups, their slots, leases and steps, in tables beside the log.

A group goes open -> ready -> leased -> consumed or filtered, or open -> given_up. A slot is (group, number, attempt)
and goes waiting -> running -> done, failed or restarted; the next attempt is a slot of its own. Every change is one
transaction with the event that causes it, so a kill at any moment leaves a task in exactly one place.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from gspo_agent.errors import JournalError
from gspo_agent.rollout.events import Begun, Ended, Episode, fold
from gspo_agent.rollout.journal import Journal, read_events
from gspo_agent.rollout.leases import Lease, Ready, choose, commit_step, ready_groups, take_lease
from gspo_agent.rollout.status import (
    RunStatus,
    StepRecord,
    last_step,
    read_last_step,
    read_status,
    read_steps,
    run_status,
)
from gspo_agent.trajectory import Status, Trajectory

__all__ = [
    "Lease",
    "Ledger",
    "NewGroup",
    "OpenGroup",
    "Ready",
    "RunStatus",
    "Settled",
    "Slot",
    "StepRecord",
    "choose",
    "read_last_step",
    "read_status",
    "read_steps",
]

T = TypeVar("T")


class Slot(NamedTuple):
    """One attempt at one member of a group."""

    id: int
    group_id: int
    number: int
    attempt: int
    seed: int
    running: bool
    """Begun in some life, and not ended."""

    def trajectory(self) -> Trajectory:
        """An empty one for this slot."""
        return Trajectory(self.group_id, self.number, self.attempt, self.seed)


class OpenGroup(NamedTuple):
    """A group with unfinished slots."""

    id: int
    source: int
    spec: str
    task: Mapping[str, Any]
    slots: Sequence[Slot]
    """The unfinished ones."""


class NewGroup(NamedTuple):
    """What a group is created from; `cursor` must be where its source stands."""

    source: int
    cursor: int
    spec: str
    task: Mapping[str, Any]
    size: int
    max_attempts: int
    min_group: int
    seed: int
    """Of the run; the seeds of the slots derive from it."""


class Settled(NamedTuple):
    """What the end of a slot led to."""

    retry: Slot | None
    group_state: str
    ready: Ready | None


class Ledger:
    """The tables of an open journal. A new one forgets the steps that no checkpoint covers: they will be done again."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._now(lambda c: _forget_uncovered(c, journal.life))

    async def create_group(self, new: NewGroup) -> OpenGroup:
        """Creates the group and moves its source's cursor in one transaction."""
        return await self._journal.transact(lambda c: _create_group(c, new))

    def begin(self, slot: Slot, event: Begun) -> Future[None]:
        return self._journal.submit(lambda c: _begin(c, slot), slot=slot.id, events=[event])

    def end(self, slot: Slot, event: Ended, reward: float) -> Future[Settled]:
        """Ends a slot. A failed one gets its next attempt while any are left; the last one settles the group."""
        return self._journal.submit(lambda c: _end(c, slot, event, reward), slot=slot.id, events=[event])

    def restart(self, slot: Slot, reason: str) -> Future[Settled]:
        """Gives up an attempt that cannot be gone on with, through no fault of its own; costs no attempt."""
        return self._journal.submit(lambda c: _restart(c, slot, reason))

    def unfinished(self) -> list[OpenGroup]:
        return self._now(_unfinished)

    def ready(self) -> list[Ready]:
        """Finished groups in the order in which they finished."""
        return self._now(ready_groups)

    def cursors(self) -> dict[int, int]:
        """Source -> how many of its tasks have been taken."""
        return self._now(lambda c: dict(c.execute("SELECT source, cursor FROM cursors").fetchall()))

    async def lease(
        self,
        step: int,
        num_groups: int,
        *,
        max_filtered: int,
        max_weight_lag: int | None = None,
        finished: Mapping[int, Sequence[Trajectory]] | None = None,
    ) -> Lease | None:
        """The lease of a step: the recorded one, or a new one; None where too few groups are ready.

        Leaves out up to `max_filtered` groups without variance. What is in `finished` (group id -> trajectories) is not
        read back. Raises JournalError where the step is committed.
        """
        blobs = self._journal.blobs
        return await self._journal.transact(
            lambda c: take_lease(c, blobs, step, num_groups, max_filtered, max_weight_lag, finished or {})
        )

    def episode(self, slot: Slot) -> Episode:
        """The slot's episode as its events have it."""
        blobs = self._journal.blobs
        return self._now(lambda c: fold(slot.trajectory(), read_events(c, slot.id, blobs)))

    def pending_leases(self) -> list[int]:
        """Steps whose lease is recorded and whose training no checkpoint covers yet, in order."""
        query = "SELECT DISTINCT step FROM leases JOIN groups ON id = group_id WHERE state = 'leased' ORDER BY step"
        return [step for (step,) in self._now(lambda c: c.execute(query).fetchall())]

    async def commit_step(
        self,
        step: int,
        lease: Lease,
        checkpoint: tuple[str, str] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Returns when the step is on disk for good.

        With a checkpoint (name, digest) the groups of this step, and of the steps since the last checkpoint, become
        consumed or filtered. Without one they stay leased: a restart trains them again.
        """
        life = self._journal.life
        await self._journal.transact(
            lambda c: commit_step(c, life, step, lease, checkpoint, metrics or {}),
            full=True,
            afterwards=None if checkpoint is None else self._prune_blobs,
        )

    def last_step(self) -> StepRecord | None:
        """The last step that a checkpoint covers; None before the first."""
        return self._now(last_step)

    def status(self) -> RunStatus:
        return self._now(lambda c: run_status(c, self._journal.path))

    def _prune_blobs(self, connection: sqlite3.Connection) -> None:
        """Deletes the files that only settled groups refer to. After a commit: a file comes before its row."""
        self._journal.blobs.prune(_needed_blobs(connection))

    def _now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        return self._journal.submit(function).result()


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by no more than rounding: 1.0 and 1.0 + 1e-9 teach nothing."""
    return max(rewards) - min(rewards) <= 1e-6 * max(1.0, *(abs(reward) for reward in rewards))


def slot_seed(*parts: int) -> int:
    """31 bits, which every sampler takes."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) >> 1


def _forget_uncovered(connection: sqlite3.Connection, life: int) -> None:
    connection.execute(
        "DELETE FROM steps WHERE life < ? "
        "AND step > (SELECT coalesce(max(step), 0) FROM steps WHERE checkpoint IS NOT NULL)",
        (life,),
    )


def _create_group(connection: sqlite3.Connection, new: NewGroup) -> OpenGroup:
    row = connection.execute("SELECT cursor FROM cursors WHERE source = ?", (new.source,)).fetchone()
    if (row[0] if row else 0) != new.cursor:
        raise JournalError(f"source {new.source} stands at task {row[0] if row else 0}, not {new.cursor}")
    connection.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (new.source, new.cursor + 1))
    values = (new.source, new.cursor, new.spec, orjson.dumps(new.task), new.size, new.max_attempts, new.min_group)
    group_id = connection.execute(
        "INSERT INTO groups (source, cursor, spec, task, size, max_attempts, min_group, seed, state) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'open')",
        (*values, new.seed),
    ).lastrowid
    assert group_id is not None
    slots = [_add_slot(connection, new.seed, group_id, number, 0) for number in range(new.size)]
    return OpenGroup(group_id, new.source, new.spec, orjson.loads(values[3]), slots)


def _add_slot(connection: sqlite3.Connection, run_seed: int, group_id: int, number: int, attempt: int) -> Slot:
    seed = slot_seed(run_seed, group_id, number, attempt)
    slot_id = connection.execute(
        "INSERT INTO slots (group_id, number, attempt, seed, state) VALUES (?, ?, ?, ?, 'waiting')",
        (group_id, number, attempt, seed),
    ).lastrowid
    assert slot_id is not None
    return Slot(slot_id, group_id, number, attempt, seed, running=False)


def _move(connection: sqlite3.Connection, slot: Slot, old: str, new: str, **columns: Any) -> None:
    names = "".join(f", {name} = :{name}" for name in columns)
    moved = connection.execute(
        f"UPDATE slots SET state = :new{names} WHERE id = :id AND state = :old",
        {"new": new, "id": slot.id, "old": old, **columns},
    ).rowcount
    if moved != 1:
        raise JournalError(f"slot {slot.id} of group {slot.group_id} is not {old}; it cannot become {new}")


def _begin(connection: sqlite3.Connection, slot: Slot) -> None:
    _move(connection, slot, "waiting", "running")


def _end(connection: sqlite3.Connection, slot: Slot, event: Ended, reward: float) -> Settled:
    failed = event.status is Status.FAILED
    if not failed and not math.isfinite(reward):
        raise JournalError(f"slot {slot.id} ended with reward {reward}; such an episode is unscored and has failed")
    _move(
        connection, slot, "running", "failed" if failed else "done",
        reward=None if failed else reward, stop_reason=event.stop_reason, ended=time.time(),
    )  # fmt: skip
    retry = None
    if failed:
        max_attempts, seed = connection.execute(
            "SELECT max_attempts, seed FROM groups WHERE id = ?", (slot.group_id,)
        ).fetchone()
        (failures,) = connection.execute(
            "SELECT count(*) FROM slots WHERE group_id = ? AND number = ? AND state = 'failed'",
            (slot.group_id, slot.number),
        ).fetchone()
        if failures < max_attempts:
            retry = _add_slot(connection, seed, slot.group_id, slot.number, slot.attempt + 1)
    return _settle_group(connection, slot.group_id, retry)


def _restart(connection: sqlite3.Connection, slot: Slot, reason: str) -> Settled:
    _move(connection, slot, "running", "restarted", stop_reason=reason, ended=time.time())
    (seed,) = connection.execute("SELECT seed FROM groups WHERE id = ?", (slot.group_id,)).fetchone()
    return Settled(_add_slot(connection, seed, slot.group_id, slot.number, slot.attempt + 1), "open", None)


def _settle_group(connection: sqlite3.Connection, group_id: int, retry: Slot | None) -> Settled:
    (unfinished,) = connection.execute(
        "SELECT count(*) FROM slots WHERE group_id = ? AND state IN ('waiting', 'running')", (group_id,)
    ).fetchone()
    if unfinished:
        return Settled(retry, "open", None)
    query = "SELECT reward FROM slots WHERE group_id = ? AND state = 'done'"
    rewards = [reward for (reward,) in connection.execute(query, (group_id,))]
    (min_group,) = connection.execute("SELECT min_group FROM groups WHERE id = ?", (group_id,)).fetchone()
    if len(rewards) < min_group:
        connection.execute("UPDATE groups SET state = 'given_up' WHERE id = ?", (group_id,))
        return Settled(None, "given_up", None)
    flat = is_flat(rewards)
    connection.execute(
        "UPDATE groups SET state = 'ready', flat = ?, ready = (SELECT coalesce(max(ready), 0) + 1 FROM groups) "
        "WHERE id = ?",
        (flat, group_id),
    )
    return Settled(None, "ready", Ready(group_id, flat))


def _unfinished(connection: sqlite3.Connection) -> list[OpenGroup]:
    groups = connection.execute("SELECT id, source, spec, task FROM groups WHERE state = 'open' ORDER BY id").fetchall()
    return [
        OpenGroup(group_id, source, spec, orjson.loads(task), [
            Slot._make((*values, state == "running"))
            for *values, state in connection.execute(
                "SELECT id, group_id, number, attempt, seed, state FROM slots "
                "WHERE group_id = ? AND state IN ('waiting', 'running') ORDER BY number",
                (group_id,),
            )
        ])
        for group_id, source, spec, task in groups
    ]  # fmt: skip


def _needed_blobs(connection: sqlite3.Connection) -> list[str]:
    query = (
        "SELECT DISTINCT blob FROM events JOIN slots ON slots.id = slot JOIN groups ON groups.id = group_id "
        "WHERE blob IS NOT NULL AND groups.state IN ('open', 'ready', 'leased')"
    )
    return [blob for (blob,) in connection.execute(query)]
