"""Groups and their slots: how they are created, begun, ended, and settled.

A group goes open -> ready -> leased -> consumed or filtered, or open -> given_up; a ready one goes back to open when
members that have grown too old are played again. A slot is (group, number, attempt) and goes waiting -> running ->
done, failed or restarted, and done -> expired; the next attempt is a slot of its own.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson

from gspo_agent.errors import JournalError
from gspo_agent.rollout.events import Ended
from gspo_agent.rollout.jobs import insert, value_lists
from gspo_agent.trajectory import Status, Trajectory, is_flat, version_step


class Ready(NamedTuple):
    """A finished group; `flat` where all its rewards are equal."""

    id: int
    flat: bool
    oldest: int | None = None
    """Step of the oldest token among the members that may still be played again; None where none may."""


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


_TRIED = (
    "(SELECT count(*) FROM slots AS tried WHERE tried.group_id = slots.group_id AND tried.number = slots.number "
    "AND tried.state IN ('failed', 'expired'))"
)
_AGAIN = f"state = 'done' AND {_TRIED} + 1 < (SELECT max_attempts FROM groups WHERE groups.id = slots.group_id)"
"""Of a slot: it may be played again, and that attempt would be no more than the last one allowed."""
_OLDEST = (
    "(SELECT min(CAST(key AS INTEGER)) FROM slots, json_each(slots.versions) "
    f"WHERE slots.group_id = groups.id AND slots.{_AGAIN})"
)


def slot_seed(*parts: int) -> int:
    """31 bits, which every sampler takes."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) >> 1


def create_groups(connection: sqlite3.Connection, new: Sequence[NewGroup]) -> list[OpenGroup]:
    """In this order."""
    cursors: dict[int, int] = dict(connection.execute("SELECT source, cursor FROM cursors").fetchall())
    rows: list[tuple[Any, ...]] = []
    for group in new:
        stands = cursors.get(group.source, 0)
        if stands != group.cursor:
            raise JournalError(f"source {group.source} stands at task {stands}, not {group.cursor}")
        cursors[group.source] = stands + 1
        rows.append((*group[:3], orjson.dumps(group.task), *group[4:], "open"))
    insert(connection, "cursors (source, cursor)", list(cursors.items()), how="INSERT OR REPLACE")
    columns = "source, cursor, spec, task, size, max_attempts, min_group, seed, state"
    ids = insert(connection, f"groups ({columns})", rows)
    places = [(group.seed, id, number, 0) for id, group in zip(ids, new, strict=True) for number in range(group.size)]
    slots = iter(_add_slots(connection, places))
    return [
        OpenGroup(id, group.source, group.spec, orjson.loads(row[3]), list(islice(slots, group.size)))
        for id, group, row in zip(ids, new, rows, strict=True)
    ]


def _add_slots(connection: sqlite3.Connection, places: Sequence[tuple[int, int, int, int]]) -> list[Slot]:
    """Waiting ones at (seed of the run, group, number, attempt)."""
    made = [(*place[1:], slot_seed(*place)) for place in places]
    columns = "group_id, number, attempt, seed, state"
    ids = insert(connection, f"slots ({columns})", [(*row, "waiting") for row in made])
    return [Slot(id, *row, running=False) for id, row in zip(ids, made, strict=True)]


def _move(connection: sqlite3.Connection, slot: Slot, old: str, new: str, **columns: Any) -> None:
    names = "".join(f", {name} = :{name}" for name in columns)
    moved = connection.execute(
        f"UPDATE slots SET state = :new{names} WHERE id = :id AND state = :old",
        {"new": new, "id": slot.id, "old": old, **columns},
    ).rowcount
    if moved != 1:
        raise JournalError(f"slot {slot.id} of group {slot.group_id} is not {old}; it cannot become {new}")


def begin(connection: sqlite3.Connection, slots: Sequence[Slot]) -> Sequence[None]:
    ids = [slot.id for slot in slots]
    begun = connection.execute(
        "UPDATE slots SET state = 'running' WHERE state = 'waiting' AND id IN (SELECT value FROM json_each(?))",
        (orjson.dumps(ids).decode(),),
    ).rowcount
    if begun != len(slots):
        raise JournalError(f"of slots {ids} only {begun} were waiting; the others cannot begin")
    return [None] * len(slots)


class Ending(NamedTuple):
    """What ends a slot."""

    slot: Slot
    event: Ended
    reward: float
    versions: Mapping[int, int]
    """Step of the weights -> tokens that they sampled."""


def end_all(connection: sqlite3.Connection, endings: Sequence[Ending]) -> list[Settled]:
    """Ends slots, one after the other as far as anybody can tell; where all are scored, with few statements."""
    scored = all(ending.event.status is not Status.FAILED and math.isfinite(ending.reward) for ending in endings)
    if len(endings) == 1 or not scored or len({ending.slot.id for ending in endings}) < len(endings):
        return [end(connection, *ending) for ending in endings]
    now = time.time()
    values = [
        (ending.slot.id, ending.reward, ending.event.stop_reason, now, _versions_json(ending.versions))
        for ending in endings
    ]
    done = 0
    for table, arguments, _ in value_lists(values):
        done += connection.execute(
            "UPDATE slots SET state = 'done', reward = column2, stop_reason = column3, ended = column4, "
            f"versions = column5 FROM {table} WHERE id = column1 AND state = 'running'",
            arguments,
        ).rowcount
    if done != len(endings):
        raise JournalError(f"of slots {[row[0] for row in values]} only {done} were running; the others cannot end")
    # A group that is over is over with the last of its members.
    last = {ending.slot.group_id: number for number, ending in enumerate(endings)}
    over = _settle(connection, sorted(last, key=last.__getitem__))
    still_open = Settled(None, "open", None)
    return [
        over.get(ending.slot.group_id, still_open) if last[ending.slot.group_id] == number else still_open
        for number, ending in enumerate(endings)
    ]


def end(
    connection: sqlite3.Connection, slot: Slot, event: Ended, reward: float, versions: Mapping[int, int]
) -> Settled:
    failed = event.status is Status.FAILED
    if not failed and not math.isfinite(reward):
        raise JournalError(f"slot {slot.id} ended with reward {reward}; such an episode is unscored and has failed")
    _move(
        connection, slot, "running", "failed" if failed else "done", reward=None if failed else reward,
        stop_reason=event.stop_reason, ended=time.time(), versions=_versions_json(versions),
    )  # fmt: skip
    retry = _retry(connection, slot) if failed else None
    return _settle(connection, [slot.group_id]).get(slot.group_id) or Settled(retry, "open", None)


def restart(connection: sqlite3.Connection, slot: Slot, reason: str) -> Settled:
    versions = _logged_versions(connection, slot)
    _move(connection, slot, "running", "restarted", stop_reason=reason, ended=time.time(), versions=versions)
    return Settled(_next_attempt(connection, slot.group_id, slot.number), "open", None)


def expire(connection: sqlite3.Connection, step: int, max_weight_lag: int) -> list[OpenGroup]:
    """Opens the ready groups again that have members too old for `step`; those members get their next attempt."""
    opened = [
        group.id
        for group in ready_groups(connection)
        if group.oldest is not None and step - group.oldest > max_weight_lag
    ]
    for group_id in opened:
        too_old = connection.execute(
            f"SELECT id, number FROM slots WHERE group_id = ? AND {_AGAIN} AND EXISTS "
            "(SELECT 1 FROM json_each(versions) WHERE ? - CAST(key AS INTEGER) > ?)",
            (group_id, step, max_weight_lag),
        ).fetchall()
        for slot_id, number in too_old:
            connection.execute("UPDATE slots SET state = 'expired' WHERE id = ?", (slot_id,))
            _next_attempt(connection, group_id, number)
        connection.execute("UPDATE groups SET state = 'open', flat = NULL, ready = NULL WHERE id = ?", (group_id,))
    return [group for group in unfinished(connection) if group.id in opened]


def recent_causes(connection: sqlite3.Connection, number: int) -> list[str | None]:
    rows = connection.execute(
        "SELECT CASE state WHEN 'failed' THEN stop_reason END FROM slots WHERE state IN ('done', 'failed', 'expired') "
        "AND id > (SELECT coalesce(max(value + 0), 0) FROM run WHERE key = 'answered') ORDER BY ended DESC LIMIT ?",
        (number,),
    )
    return [cause for (cause,) in rows][::-1]


def answer_failures(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT OR REPLACE INTO run SELECT 'answered', coalesce(max(id), 0) FROM slots")


def _logged_versions(connection: sqlite3.Connection, slot: Slot) -> str:
    # One row, because every row that is fetched gives up the interpreter's lock.
    query = "SELECT group_concat(CAST(data AS TEXT)) FROM events WHERE slot = ? AND kind = 'sampled'"
    (rows,) = connection.execute(query, (slot.id,)).fetchone()
    tokens: Counter[int] = Counter()
    for _, _, spans, *_ in orjson.loads(f"[{rows or ''}]"):
        for _, version, length in spans:
            tokens[version_step(version)] += length
    return _versions_json(tokens)


def _versions_json(tokens: Mapping[int, int]) -> str:
    return orjson.dumps(tokens, option=orjson.OPT_NON_STR_KEYS).decode()


def _next_attempt(connection: sqlite3.Connection, group_id: int, number: int) -> Slot:
    seed, attempt = connection.execute(
        "SELECT groups.seed, max(attempt) + 1 FROM groups JOIN slots ON group_id = groups.id "
        "WHERE groups.id = ? AND number = ?",
        (group_id, number),
    ).fetchone()
    return _add_slots(connection, [(seed, group_id, number, attempt)])[0]


def _retry(connection: sqlite3.Connection, slot: Slot) -> Slot | None:
    """The next attempt of a failed slot. Where none is left, a scored one that was only too old counts again."""
    tried, max_attempts = connection.execute(
        f"SELECT {_TRIED}, (SELECT max_attempts FROM groups WHERE id = group_id) FROM slots WHERE id = ?", (slot.id,)
    ).fetchone()
    if tried < max_attempts:
        return _next_attempt(connection, slot.group_id, slot.number)
    connection.execute(
        "UPDATE slots SET state = 'done' WHERE id = "
        "(SELECT max(id) FROM slots WHERE group_id = ? AND number = ? AND state = 'expired')",
        (slot.group_id, slot.number),
    )
    return None


def _settle(connection: sqlite3.Connection, group_ids: Sequence[int]) -> dict[int, Settled]:
    """Those of these groups that are over, and what that leads to; they get ready in this order."""
    # Few cells, because every one that is fetched gives up the interpreter's lock; not the rewards, which JSON rounds.
    over = connection.execute(
        f"SELECT json_array(groups.id, min_group, count(reward), {_OLDEST}, "
        "(SELECT coalesce(max(ready), 0) FROM groups), (SELECT coalesce(max(step), 0) FROM steps)), "
        "min(reward), max(reward) "
        "FROM json_each(?) AS asked JOIN groups ON groups.id = asked.value "
        "LEFT JOIN slots ON group_id = groups.id AND slots.state = 'done' "
        "WHERE NOT EXISTS (SELECT 1 FROM slots WHERE group_id = groups.id AND state IN ('waiting', 'running')) "
        "GROUP BY asked.key ORDER BY asked.key",
        (orjson.dumps(group_ids).decode(),),
    ).fetchall()
    outcomes: dict[int, Settled] = {}
    rows: list[tuple[Any, ...]] = []
    for numbers, lowest, highest in over:
        group_id, min_group, scored, oldest, ready, step = orjson.loads(numbers)
        if scored < min_group:
            outcomes[group_id] = Settled(None, "given_up", None)
            rows.append((group_id, "given_up", None, None, step + 1))  # with the step that is being gathered
        else:
            flat = is_flat((lowest, highest))
            outcomes[group_id] = Settled(None, "ready", Ready(group_id, flat, oldest))
            rows.append((group_id, "ready", flat, ready + len(rows) + 1, None))
    for table, arguments, _ in value_lists(rows):
        connection.execute(
            "UPDATE groups SET state = column2, flat = column3, ready = column4, settled = column5 "
            f"FROM {table} WHERE id = column1",
            arguments,
        )
    return outcomes


def ready_groups(connection: sqlite3.Connection) -> list[Ready]:
    """In the order in which they finished."""
    (rows,) = connection.execute(
        f"SELECT json_group_array(json_array(ready, id, flat, {_OLDEST})) FROM groups WHERE state = 'ready'"
    ).fetchone()
    return [Ready(group_id, bool(flat), oldest) for _, group_id, flat, oldest in sorted(orjson.loads(rows))]


def living(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT group_id, number, attempt, seed FROM slots WHERE state = 'running' "
        "AND EXISTS (SELECT 1 FROM events WHERE slot = slots.id AND kind = 'observed') ORDER BY id"
    )
    return [Trajectory(*row).id for row in rows]


def unfinished(connection: sqlite3.Connection) -> list[OpenGroup]:
    """Groups with slots that wait or run, in the order in which they were created."""
    groups = {
        group_id: OpenGroup(group_id, source, spec, orjson.loads(task), [])
        for group_id, source, spec, task in connection.execute(
            "SELECT id, source, spec, task FROM groups WHERE state = 'open' ORDER BY id"
        )
    }
    slots: dict[int, list[Slot]] = {group_id: [] for group_id in groups}
    for *values, state in connection.execute(
        "SELECT id, group_id, number, attempt, seed, state FROM slots WHERE state IN ('waiting', 'running') "
        "ORDER BY number"
    ):
        slot = Slot._make((*values, state == "running"))
        slots[slot.group_id].append(slot)
    return [group._replace(slots=slots[group.id]) for group in groups.values()]
