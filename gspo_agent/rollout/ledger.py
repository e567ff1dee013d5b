"""Who has what: groups, their slots, leases and steps, in tables beside the log.

`groups` has what happens to groups and slots, `leases` what happens to steps. Every change is one transaction with the
event that causes it, so a kill at any moment leaves a task in exactly one place.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from gspo_agent.rollout import groups, leases
from gspo_agent.rollout.events import Begun, Ended, Episode, fold
from gspo_agent.rollout.groups import NewGroup, OpenGroup, Ready, Settled, Slot
from gspo_agent.rollout.journal import Journal, read_events
from gspo_agent.rollout.leases import Lease, choose
from gspo_agent.rollout.status import (
    RunStatus,
    StepRecord,
    covered_steps,
    last_step,
    read_last_step,
    read_status,
    read_steps,
    run_status,
)
from gspo_agent.trajectory import Trajectory

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


class Ledger:
    """The tables of an open journal. A new one forgets the steps that no checkpoint covers: they will be done again."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._now(lambda c: leases.forget_uncovered(c, journal.life))

    async def create_groups(self, new: Sequence[NewGroup]) -> list[OpenGroup]:
        """Creates groups, in this order, and moves the cursors of their sources in one transaction."""
        return await self._journal.transact(lambda c: groups.create_groups(c, new))

    def begin(self, slot: Slot, event: Begun, told: Future[None] | None = None) -> None:
        """A slot starts to run; `told` hears of it, if anybody has to."""
        self._journal.submit_together(groups.begin, slot, slot.id, event, told)

    def end(
        self,
        slot: Slot,
        event: Ended,
        reward: float,
        versions: Mapping[int, int],
        told: Future[Settled] | asyncio.Future[Settled],
    ) -> None:
        """Ends a slot. A failed one gets its next attempt while any are left; the last one settles the group.

        Args:
            versions: Step of the weights -> tokens that they sampled.
            told: Hears what came of it, when that is on disk.
        """
        self._journal.submit_together(
            groups.end_all, groups.Ending(slot, event, reward, versions), slot.id, event, told
        )

    def restart(self, slot: Slot, reason: str) -> Future[Settled]:
        """Gives up an attempt that cannot be gone on with, through no fault of its own; costs no attempt."""
        return self._journal.submit(lambda c: groups.restart(c, slot, reason))

    def unfinished(self) -> list[OpenGroup]:
        return self._now(groups.unfinished)

    def living(self) -> list[str]:
        """Ids of the episodes that have begun, were reset, and have not ended."""
        return self._now(groups.living)

    def ready(self) -> list[Ready]:
        """Finished groups in the order in which they finished."""
        return self._now(groups.ready_groups)

    def cursors(self) -> dict[int, int]:
        """Source -> how many of its tasks have been taken."""
        return self._now(lambda c: dict(c.execute("SELECT source, cursor FROM cursors").fetchall()))

    def recent_causes(self, number: int) -> list[str | None]:
        """Of the last `number` attempts that ended, oldest first: why each failed, None where it did not. Those before
        the last `answer_failures` are left out."""
        return self._now(lambda c: groups.recent_causes(c, number))

    async def answer_failures(self) -> None:
        """The run stops for its failures, and whoever starts it again has seen to them."""
        await self._journal.transact(groups.answer_failures)

    async def expire(self, step: int, max_weight_lag: int) -> list[OpenGroup]:
        """Opens ready groups again whose members hold tokens that are too old for training step `step`, and returns
        them with the attempts that are to be played.

        A member has failed and expired attempts up to the group's `max_attempts`; past that it stays as it is, to be
        masked. An expired member counts again where every later attempt has failed.
        """
        return await self._journal.transact(lambda c: groups.expire(c, step, max_weight_lag))

    async def roll_back(self, step: int) -> None:
        """Forgets every step after `step` (0: all): their groups are leased again, in the recorded order.

        For a start whose newest checkpoint cannot be read: the steps after an older one are trained again from the
        journal, and nothing is generated for them. Raises JournalError where `step` has no checkpoint, where its groups
        have left the journal, or where this life has committed a step that would be forgotten: its weight version could
        not be used again.
        """
        life = self._journal.life
        await self._journal.transact(lambda c: leases.roll_back(c, life, step), full=True)

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
            lambda c: leases.take_lease(c, blobs, step, num_groups, max_filtered, max_weight_lag, finished or {})
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
            lambda c: leases.commit_step(c, life, step, lease, checkpoint, metrics or {}),
            full=True,
            afterwards=None if checkpoint is None else self._prune_blobs,
        )

    def last_step(self) -> StepRecord | None:
        """The last step that a checkpoint covers; None before the first."""
        return self._now(last_step)

    def checkpoints(self) -> list[StepRecord]:
        """Every step that has a checkpoint of its own, the newest first."""
        return self._now(covered_steps)

    def status(self) -> RunStatus:
        return self._now(lambda c: run_status(c, self._journal.path))

    def _prune_blobs(self, connection: sqlite3.Connection) -> None:
        """Deletes the files that only settled groups refer to. After a commit: a file comes before its row."""
        self._journal.blobs.prune(_needed_blobs(connection))

    def _now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        return self._journal.submit(function).result()


def _needed_blobs(connection: sqlite3.Connection) -> list[str]:
    # States are for going on with an episode; what belongs to its tokens goes when they go.
    query = (
        "SELECT DISTINCT blob FROM events JOIN slots ON slots.id = slot JOIN groups ON groups.id = group_id "
        "WHERE blob IS NOT NULL AND (kind = 'sampled' OR groups.state IN ('open', 'ready', 'leased'))"
    )
    return [blob for (blob,) in connection.execute(query)]
