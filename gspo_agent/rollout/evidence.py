"""What the events of attempts prove: no token sampled again, no weight version in two lives, no call begun twice.

The audit gathers it over everything that the journal holds. When attempts leave the journal it is gathered over them
first, and what it found stays behind as tallies, so an audit of the same run says the same before and after.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from gspo_agent.rollout import tallies
from gspo_agent.trajectory import weight_version

EVENTS = (
    "SELECT id, slot, kind, CASE WHEN kind IN ('sampled', 'call_begun') THEN data END, length(token_ids) / 4 "
    "FROM events WHERE slot > 0"
)
"""The columns that `Evidence.take` gets; to be completed with more conditions and ORDER BY id."""


@dataclass(slots=True)
class _Attempt:
    """Where one attempt stands."""

    position: int = 0
    sampled: int = 0
    lives: set[int] = field(default_factory=set)
    """In which tokens were sampled."""
    calls: set[str] = field(default_factory=set)
    last: tuple[str, int] = ("", 0)
    """Kind and life of its newest event."""


class Evidence:
    """Takes events in their order and adds up what they prove."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        rows = connection.execute("SELECT life, first_event, ended IS NULL FROM lives ORDER BY life").fetchall()
        self._lives = [life for life, _, _ in rows]
        self._first_events = [first for _, first, _ in rows]
        self._killed = {life for life, _, open_end in rows[:-1] if open_end}
        self._attempts: dict[int, _Attempt] = {}
        self.counts: Counter[str] = Counter()
        """"sampled_tokens"; "continued": attempts that sampled in several lives; "cut_requests": requests that a kill
        may have cut, each at the cost of no more than one request's tokens."""
        self.breaches: Counter[str] = Counter()

    def take(self, number: int, slot: int, kind: str, data: bytes | None, length: int | None) -> None:
        """One event: its id, its attempt, what it is, its JSON where it is needed, and how many tokens it has."""
        attempt = self._attempts.setdefault(slot, _Attempt())
        life = self._lives[max(0, bisect_right(self._first_events, number) - 1)] if self._lives else 0
        before, earlier = attempt.last
        if before == "ended":
            self.breaches[f"slot {slot}: {kind} after its end"] += 1
        if kind == "sampled":
            if before in ("observed", "sampled") and earlier != life and earlier in self._killed:
                self.counts["cut_requests"] += 1
            self._take_tokens(attempt, slot, life, orjson.loads(data or b"[]"), length or 0)
        elif kind == "observed":
            attempt.position += length or 0
        elif kind == "call_begun":
            call_id, name, _, *idempotent = orjson.loads(data or b"[]")
            if call_id in attempt.calls and not any(idempotent):
                self.breaches[f"slot {slot}: call {call_id} of {name} was begun twice"] += 1
            attempt.calls.add(call_id)
        if kind != "spent":  # which says nothing about what is waited for
            attempt.last = kind, life

    def _take_tokens(self, attempt: _Attempt, slot: int, life: int, data: list[Any], length: int) -> None:
        _, offset, spans, *_ = data
        if offset != attempt.position:
            self.breaches[f"slot {slot}: tokens sampled at {offset}, but {attempt.position} were there"] += 1
        # A process samples under its own life's versions only; so no two weights share one.
        for foreign in {version // weight_version(1, 0) for _, version, _ in spans} - {life}:
            what = "was used again" if foreign in self._lives else "which never was, was used"
            self.breaches[f"slot {slot}: a version of life {foreign} {what} in life {life}"] += 1
        attempt.position = offset + length
        attempt.sampled += length
        attempt.lives.add(life)

    def close(self, slot: int, state: str, versions: str | None) -> None:
        """All events of this attempt were taken: compares them with its row in the ledger."""
        attempt = self._attempts.pop(slot, _Attempt())
        self.counts["sampled_tokens"] += attempt.sampled
        self.counts["continued"] += len(attempt.lives) > 1
        if state in ("done", "failed", "expired") and attempt.last[0] != "ended":
            self.breaches[f"slot {slot} is {state}, and its events do not end"] += 1
        if versions is not None and (noted := sum(orjson.loads(versions).values())) != attempt.sampled:
            self.breaches[f"slot {slot} notes {noted} sampled tokens, its events have {attempt.sampled}"] += 1

    def strays(self) -> set[int]:
        """Attempts whose events were taken and that the ledger does not know."""
        return set(self._attempts)

    def keep(self, connection: sqlite3.Connection) -> None:
        """Leaves it behind as tallies."""
        tallies.add(connection, "evidence", self.counts)
        tallies.add(connection, "breach", self.breaches)

    def add_kept(self, connection: sqlite3.Connection) -> None:
        """Adds what attempts left behind that are gone."""
        self.counts.update(tallies.read(connection, "evidence"))
        self.breaches.update(tallies.read(connection, "breach"))
