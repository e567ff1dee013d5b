"""What a run can prove about itself: nothing lost, nothing trained twice, no token sampled again.

Counted from the journal and the ledger alone, so it may be run on a copy, on another host, years later.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import orjson

from gspo_agent.rollout import schema
from gspo_agent.trajectory import weight_version


@dataclass(frozen=True, slots=True)
class Audit:
    """`breaches` is empty where every promise was kept."""

    lives: int
    steps: int
    tasks: int
    """Taken from the task sources."""
    groups: Mapping[str, int]
    """State -> number; every task is in exactly one."""
    episodes: int
    continued: int
    """Episodes that sampled tokens in more than one life."""
    sampled_tokens: int
    breaches: tuple[str, ...]

    def __str__(self) -> str:
        states = ", ".join(f"{number} {name}" for name, number in self.groups.items())
        lines = [
            f"{self.lives} lives, {self.steps} steps, {self.tasks} tasks: {states}",
            f"{self.episodes} episodes, {self.continued} of them went on in a later life, "
            f"{self.sampled_tokens} sampled tokens",
        ]
        lines += [f"BREACH: {breach}" for breach in self.breaches]
        return "\n".join(
            lines
            if self.breaches
            else [*lines, "no task lost or trained twice, no token sampled or version used again"]
        )


def audit(path: str | Path) -> Audit:
    """Checks the journal at `path`; needs no lock. Raises JournalError where there is none."""
    with closing(schema.read_only(Path(path))) as connection:
        try:
            connection.execute("BEGIN")
            return _audit(connection)
        except sqlite3.Error as error:
            raise schema.damaged(Path(path), error) from error


def _audit(connection: sqlite3.Connection) -> Audit:
    tokens, continued, token_breaches = _tokens(connection)
    groups = dict(connection.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
    return Audit(
        lives=_count(connection, "SELECT count(*) FROM lives"),
        steps=_count(connection, "SELECT count(*) FROM steps"),
        tasks=_count(connection, "SELECT coalesce(sum(cursor), 0) FROM cursors"),
        groups=groups,
        episodes=_count(connection, "SELECT count(*) FROM slots"),
        continued=continued,
        sampled_tokens=tokens,
        breaches=(*_tasks(connection), *_training(connection), *token_breaches),
    )


def _tasks(connection: sqlite3.Connection) -> list[str]:
    """Every task that a source gave has exactly one group, and every finished group was settled by its slots."""
    breaches = []
    for source, cursor in connection.execute("SELECT source, cursor FROM cursors").fetchall():
        taken = [c for (c,) in connection.execute("SELECT cursor FROM groups WHERE source = ?", (source,))]
        lost = set(range(cursor)) - set(taken)
        if lost:
            breaches.append(f"source {source}: tasks {sorted(lost)[:10]} were taken and have no group")
        if len(taken) != len(set(taken)):
            breaches.append(f"source {source}: a task has two groups")
    orphans = _count(
        connection,
        "SELECT count(*) FROM groups WHERE state = 'open' AND NOT EXISTS "
        "(SELECT 1 FROM slots WHERE group_id = groups.id AND state IN ('waiting', 'running'))",
    )
    if orphans:
        breaches.append(f"{orphans} open groups have no unfinished slot: they would wait for ever")
    return breaches


def _training(connection: sqlite3.Connection) -> list[str]:
    """Steps follow each other without a gap, and a group belongs to at most one of them."""
    breaches = []
    steps = [step for (step,) in connection.execute("SELECT step FROM steps ORDER BY step")]
    if steps != list(range(1, len(steps) + 1)):
        breaches.append(f"the committed steps have gaps: {steps}")
    twice = _count(connection, "SELECT count(*) FROM (SELECT 1 FROM leases GROUP BY group_id HAVING count(*) > 1)")
    if twice:
        breaches.append(f"{twice} groups were leased to two steps")
    covered = "SELECT coalesce(max(step), 0) FROM steps WHERE checkpoint IS NOT NULL"
    queries = (
        ("settled without a durable step", "state IN ('consumed', 'filtered')", f"coalesce(step, 1e9) > ({covered})"),
        ("in a durable step and not settled", "state NOT IN ('consumed', 'filtered')", f"step <= ({covered})"),
    )
    for what, state, condition in queries:
        found = _count(
            connection,
            f"SELECT count(*) FROM groups LEFT JOIN leases ON group_id = id WHERE {state} AND {condition}",
        )
        if found:
            breaches.append(f"{found} groups are {what}")
    return breaches


def _tokens(connection: sqlite3.Connection) -> tuple[int, int, list[str]]:
    """(sampled tokens, episodes that sampled in several lives, breaches) over every attempt."""
    breaches: list[str] = []
    total = continued = 0
    lives = {life for (life,) in connection.execute("SELECT life FROM lives")}
    newest = 0
    ends: dict[int, int] = {}
    versions: dict[int, set[int]] = {}
    rows = connection.execute(
        "SELECT slot, kind, data, length(token_ids) / 4 FROM events WHERE kind IN ('observed', 'sampled') ORDER BY id"
    )
    for slot, kind, data, length in rows:
        position = ends.get(slot, 0)
        if kind == "sampled":
            _, offset, spans, *_ = orjson.loads(data)
            total += length
            # A process writes its own life's versions only, so in the order of the log they never go back.
            earliest = min((version // weight_version(1, 0) for _, version, _ in spans), default=newest)
            if earliest < newest:
                breaches.append(f"slot {slot}: a version of life {earliest} was used again in life {newest}")
            newest = max([newest, *(version // weight_version(1, 0) for _, version, _ in spans)])
            if offset != position:
                breaches.append(f"slot {slot}: tokens sampled at {offset}, but {position} were there")
            versions.setdefault(slot, set()).update(version for _, version, _ in spans)
            position = offset
        ends[slot] = position + (length or 0)
    for slot, seen in versions.items():
        of = {version // weight_version(1, 0) for version in seen}
        continued += len(of) > 1
        if not of <= lives:
            breaches.append(f"slot {slot} holds weights of lives {sorted(of - lives)}, which never were")
    return total, continued, breaches


def _count(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
