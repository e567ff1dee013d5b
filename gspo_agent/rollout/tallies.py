"""Counts over a whole run: what its tables hold now, and what the groups that have left them add."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

_MOST_NAMES = 200  # of one kind; texts with ids in them would add up without end
OTHERS = "(others)"


def add(connection: sqlite3.Connection, kind: str, counts: Mapping[str, int]) -> None:
    """Adds to what is left of retired groups; names past the first 200 of a kind are counted as "(others)"."""
    known = {name for (name,) in connection.execute("SELECT name FROM tallies WHERE kind = ?", (kind,))}
    for name, number in counts.items():
        if name not in known and len(known) >= _MOST_NAMES:
            name = OTHERS
        known.add(name)
        connection.execute(
            "INSERT INTO tallies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number",
            (kind, name, number),
        )


def read(connection: sqlite3.Connection, kind: str) -> dict[str, int]:
    """What retired groups add."""
    return dict(connection.execute("SELECT name, number FROM tallies WHERE kind = ?", (kind,)).fetchall())


def group_states(connection: sqlite3.Connection) -> dict[str, int]:
    """State -> groups of the whole run."""
    return _with_retired(connection, "group", "SELECT state, count(*) FROM groups GROUP BY state")


def slot_states(connection: sqlite3.Connection) -> dict[str, int]:
    """State -> attempts of the whole run."""
    return _with_retired(connection, "slot", "SELECT state, count(*) FROM slots GROUP BY state")


def failures(connection: sqlite3.Connection) -> dict[str, int]:
    """Cause -> failed attempts of the whole run, the commonest first."""
    counts = _with_retired(
        connection, "failure", "SELECT stop_reason, count(*) FROM slots WHERE state = 'failed' GROUP BY stop_reason"
    )
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _with_retired(connection: sqlite3.Connection, kind: str, query: str) -> dict[str, int]:
    counts = read(connection, kind)
    for name, number in connection.execute(query):
        counts[str(name)] = counts.get(str(name), 0) + number
    return counts
