"""Retention: what was trained on long ago leaves the journal, so that its file stays bounded.

A step leaves in this order: its episodes are exported (if they are), on disk and under their name; the log gets a mark
that they are leaving; then attempt after attempt goes, each in one transaction with what its events proved. A kill
before the mark exports the step again, to the same bytes; after it, only the rest has to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import orjson

from gspo_agent.background import off_loop
from gspo_agent.rollout import export, schema, tallies
from gspo_agent.rollout.audit import member_breaches
from gspo_agent.rollout.evidence import EVENTS, Evidence
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.leases import retired_step

_CHUNK = 500  # events, or groups, that leave in one transaction: a few milliseconds of the writer


class Retention:
    """Retires in the background of a run; a step waits only where the one before it is still leaving."""

    def __init__(self, journal: Journal, keep_steps: int | Literal["all"], export: Path | None) -> None:
        self._journal, self._keep_steps, self._export = journal, keep_steps, export
        self._task: asyncio.Task[list[int]] | None = None

    async def begin(self, oldest_checkpoint: int | None) -> None:
        """After a commit: `oldest_checkpoint` is the oldest step that the run may still be rolled back to."""
        await self.finish()
        how = {"oldest_checkpoint": oldest_checkpoint, "keep_steps": self._keep_steps, "export": self._export}
        self._task = asyncio.get_running_loop().create_task(retire(self._journal, **how))  # type: ignore[arg-type]

    async def finish(self) -> None:
        """Waits for what has begun; raises what stopped it."""
        if self._task is not None:
            await self._task
            self._task = None

    async def stop(self) -> None:
        """Leaves the rest to the next start."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(BaseException):
                await self._task
            self._task = None


async def retire(
    journal: Journal, *, oldest_checkpoint: int | None, keep_steps: int | Literal["all"], export: Path | None = None
) -> list[int]:
    """Lets the episodes of old steps leave the journal; returns those steps.

    Old are steps that were trained more than `keep_steps` before the newest one with a checkpoint, and that no rollback
    to `oldest_checkpoint` (None: to the beginning) would train again. Reading and encoding happen in a thread of their
    own, and the writer is held for a few milliseconds at a time. Raises JournalError where a file cannot be written.

    Args:
        export: The folder for `step-NNNNNN.parquet`; None: nothing is kept.
    """
    if keep_steps == "all" or oldest_checkpoint is None:
        return []
    most = oldest_checkpoint
    keep = keep_steps
    steps, begun = await journal.transact(lambda c: _due(c, most, keep))
    for step in steps:
        if export is not None and step > begun:
            await _export(journal, step, export)
        await journal.transact(lambda c, step=step: _mark(c, step))  # type: ignore[misc]
        while await journal.transact(lambda c, step=step: _let_go(c, step)):  # type: ignore[misc]
            pass
    return steps


def _due(connection: sqlite3.Connection, oldest_checkpoint: int, keep_steps: int) -> tuple[list[int], int]:
    """(steps to retire, the last one that was begun)"""
    (newest,) = connection.execute("SELECT coalesce(max(step), 0) FROM steps WHERE checkpoint NOT NULL").fetchone()
    rows = connection.execute(
        "SELECT DISTINCT settled FROM groups WHERE settled <= ? ORDER BY settled",
        (min(newest - keep_steps, oldest_checkpoint),),
    )
    return [step for (step,) in rows], retired_step(connection)


async def _export(journal: Journal, step: int, directory: Path) -> None:
    stopped = threading.Event()

    def write() -> None:
        export.discard_leftovers(directory)
        if schema.on_network(journal.path):  # where nobody else can open it
            export.export_step(lambda f: journal.submit(f).result(), journal.blobs, step, directory, go_on)
            return
        with closing(schema.read_only(journal.path)) as connection:
            export.export_step(lambda f: f(connection), journal.blobs, step, directory, go_on)

    def go_on() -> bool:
        return not stopped.is_set()

    try:
        await off_loop(write)
    finally:
        stopped.set()


def _mark(connection: sqlite3.Connection, step: int) -> None:
    """From here on attempts of `step` may be gone. The newest mark is the newest event, so no id is used again."""
    if retired_step(connection) >= step:
        return
    tallies.add(connection, "breach", Counter(member_breaches(connection, f"settled = {step}")))
    mark = connection.execute(
        "INSERT INTO events (slot, at, kind, data) VALUES (0, ?, 'retired', ?)", (time.time(), orjson.dumps(step))
    ).lastrowid
    connection.execute("DELETE FROM events WHERE slot = 0 AND id < ?", (mark,))


def _let_go(connection: sqlite3.Connection, step: int) -> bool:
    """Deletes some of what is left of a step, and adds it to the tallies; False where nothing was left."""
    slots = connection.execute(
        "SELECT slots.id, slots.state, stop_reason, versions FROM groups JOIN slots ON group_id = groups.id "
        "WHERE settled = ? ORDER BY slots.id LIMIT ?",
        (step, _CHUNK),
    ).fetchall()
    return _let_attempts_go(connection, slots) if slots else _let_groups_go(connection, step)


def _let_attempts_go(connection: sqlite3.Connection, slots: list[tuple[Any, ...]]) -> bool:
    evidence, number = Evidence(connection), 0
    states: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for slot, state, stop_reason, versions in slots:
        events = connection.execute(f"{EVENTS} AND slot = ? ORDER BY id", (slot,)).fetchall()
        for event in events:
            evidence.take(*event)
        evidence.close(slot, state, versions)
        states[state] += 1
        if state == "failed":
            failures[stop_reason] += 1
        connection.execute("DELETE FROM events WHERE slot = ?", (slot,))
        connection.execute("DELETE FROM slots WHERE id = ?", (slot,))
        number += len(events)
        if number >= _CHUNK:
            break
    evidence.keep(connection)
    tallies.add(connection, "slot", states)
    tallies.add(connection, "failure", failures)
    return True


def _let_groups_go(connection: sqlite3.Connection, step: int) -> bool:
    groups = connection.execute(
        "SELECT id, state, source, cursor FROM groups WHERE settled = ? ORDER BY id LIMIT ?", (step, _CHUNK)
    ).fetchall()
    for group_id, _, source, cursor in groups:
        connection.execute("DELETE FROM leases WHERE group_id = ?", (group_id,))
        connection.execute("DELETE FROM groups WHERE id = ?", (group_id,))
        _note_task(connection, source, cursor)
    tallies.add(connection, "group", Counter(state for _, state, _, _ in groups))
    return bool(groups)


def _note_task(connection: sqlite3.Connection, source: int, cursor: int) -> None:
    """Keeps that this task was settled; neighbours become one row."""
    first, last = connection.execute(
        "SELECT (SELECT first FROM retired WHERE source = :s AND last = :c - 1), "
        "(SELECT last FROM retired WHERE source = :s AND first = :c + 1)",
        {"s": source, "c": cursor},
    ).fetchone()
    connection.execute("DELETE FROM retired WHERE source = ? AND first IN (?, ?)", (source, first, cursor + 1))
    ends = (cursor if first is None else first, cursor if last is None else last)
    connection.execute("INSERT INTO retired VALUES (?, ?, ?)", (source, *ends))
