"""What a run can prove about itself: nothing lost, nothing trained twice, no token sampled again.

Counted from the journal and the ledger alone, so it may be run on a copy, on another host, years later. What has left
the journal was checked when it left (`evidence`); its counts and breaches are part of every later audit.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gspo_agent.rollout import schema, tallies
from gspo_agent.rollout.evidence import EVENTS, Evidence
from gspo_agent.rollout.leases import retired_step


@dataclass(frozen=True, slots=True)
class Audit:
    """`breaches` is empty where every promise was kept."""

    lives: int
    steps: int
    tasks: int
    """Taken from the task sources."""
    groups: Mapping[str, int]
    """State -> number; every task is in exactly one."""
    retired: int
    """Groups whose episodes have left the journal; they count in `groups` and in everything else."""
    slots: Mapping[str, int]
    """State -> attempts."""
    continued: int
    """Attempts that sampled tokens in more than one life."""
    sampled_tokens: int
    cut_requests: int
    """Requests that may have been running when a process was killed; each may have lost what it had sampled since it
    began, at most `rollout.journal_tokens`."""
    rollbacks: tuple[tuple[int, int], ...]
    """(newest step, step rolled back to), in order."""
    breaches: tuple[str, ...]

    @property
    def episodes(self) -> int:
        return sum(self.slots.values())

    def __str__(self) -> str:
        def named(counts: Mapping[str, int]) -> str:
            return ", ".join(f"{number} {name}" for name, number in counts.items())

        lines = [
            f"{self.lives} lives, {self.steps} steps, {self.tasks} tasks: {named(self.groups)}",
            f"{self.episodes} episodes: {named(self.slots)}; {self.continued} of them went on in a later life, "
            f"{self.sampled_tokens} sampled tokens",
        ]
        if self.retired:
            lines.append(f"the episodes of {self.retired} groups have left the journal, and were checked when they did")
        if self.cut_requests:
            lines.append(
                f"{self.cut_requests} requests may have been cut by a kill: each lost at most rollout.journal_tokens"
            )
        lines += [f"rolled back from step {newest} to step {step}" for newest, step in self.rollbacks]
        lines += [f"BREACH: {breach}" for breach in self.breaches]
        return "\n".join(
            lines
            if self.breaches
            else [*lines, "no task lost or trained twice, no token sampled, version used or call begun again"]
        )


def audit(path: str | Path) -> Audit:
    """Checks the journal at `path`; needs no lock. Raises JournalError where there is none, or a page is damaged."""
    with closing(schema.read_only(Path(path))) as connection:
        try:
            connection.execute("BEGIN")
            schema.check_whole(connection, Path(path))
            return _audit(connection)
        except sqlite3.Error as error:
            raise schema.damaged(Path(path), error) from error


def _audit(connection: sqlite3.Connection) -> Audit:
    evidence = _evidence(connection)
    rolled = connection.execute("SELECT newest, step FROM rollbacks ORDER BY at").fetchall()
    breaches = [f"{text} ({n} times)" if n > 1 else text for text, n in evidence.breaches.items()]
    return Audit(
        lives=_count(connection, "SELECT count(*) FROM lives"),
        steps=_count(connection, "SELECT count(*) FROM steps"),
        tasks=_count(connection, "SELECT coalesce(sum(cursor), 0) FROM cursors"),
        groups=tallies.group_states(connection),
        retired=sum(tallies.read(connection, "group").values()),
        slots=tallies.slot_states(connection),
        continued=evidence.counts["continued"],
        sampled_tokens=evidence.counts["sampled_tokens"],
        cut_requests=evidence.counts["cut_requests"],
        rollbacks=tuple(rolled),
        breaches=(
            *_tasks(connection),
            *member_breaches(connection, f"(settled IS NULL OR settled > {retired_step(connection)})"),
            *_training(connection),
            *breaches,
        ),
    )


def _evidence(connection: sqlite3.Connection) -> Evidence:
    """Of every attempt, those that are gone included."""
    evidence = Evidence(connection)
    for row in connection.execute(f"{EVENTS} ORDER BY id"):
        evidence.take(*row)
    for slot, state, versions in connection.execute("SELECT id, state, versions FROM slots"):
        evidence.close(slot, state, versions)
    for slot in evidence.strays():
        evidence.breaches[f"slot {slot} has events, and there is no such slot"] += 1
    evidence.add_kept(connection)
    return evidence


def _tasks(connection: sqlite3.Connection) -> list[str]:
    """Every task that a source gave has exactly one group, here or gone."""
    breaches = []
    for source, cursor in connection.execute("SELECT source, cursor FROM cursors").fetchall():
        taken = [c for (c,) in connection.execute("SELECT cursor FROM groups WHERE source = ?", (source,))]
        for first, last in connection.execute("SELECT first, last FROM retired WHERE source = ?", (source,)):
            taken += range(first, last + 1)
        lost = set(range(cursor)) - set(taken)
        if lost:
            breaches.append(f"source {source}: tasks {sorted(lost)[:10]} were taken and have no group")
        if len(taken) != len(set(taken)):
            breaches.append(f"source {source}: a task has two groups")
    return breaches


def member_breaches(connection: sqlite3.Connection, where: str) -> list[str]:
    """A group is open while a slot of it is unfinished, and afterwards has one scored attempt of enough members.

    `where` is a condition on the table groups: those of which no attempt has gone.
    """
    unfinished = "(SELECT 1 FROM slots WHERE group_id = groups.id AND slots.state IN ('waiting', 'running'))"
    of_members = "SELECT count(*) FROM (SELECT 1 FROM slots JOIN groups ON groups.id = group_id"
    checks = (
        (
            "{} open groups have no unfinished slot: they would wait for ever",
            f"SELECT count(*) FROM groups WHERE state = 'open' AND {where} AND NOT EXISTS {unfinished}",
        ),
        (
            "{} groups are over, and have unfinished slots",
            f"SELECT count(*) FROM groups WHERE state != 'open' AND {where} AND EXISTS {unfinished}",
        ),
        (
            "{} groups were handed out with fewer scored members than min_group",
            f"SELECT count(*) FROM groups WHERE state NOT IN ('open', 'given_up') AND {where} AND min_group > "
            "(SELECT count(*) FROM slots WHERE group_id = groups.id AND slots.state = 'done')",
        ),
        (
            "{} members have two scored attempts",
            f"{of_members} WHERE slots.state = 'done' AND {where} GROUP BY group_id, number HAVING count(*) > 1)",
        ),
        (
            "{} members have more failed and expired attempts than max_attempts",
            f"{of_members} WHERE slots.state IN ('failed', 'expired') AND {where} GROUP BY group_id, number "
            "HAVING count(*) > max_attempts)",
        ),
    )
    found = ((text, _count(connection, query)) for text, query in checks)
    return [text.format(number) for text, number in found if number]


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


def _count(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
