"""What a run is doing, read from its file, also while another process writes it."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from gspo_agent.rollout import schema
from gspo_agent.rollout.lock import EXPIRY

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step."""

    step: int
    life: int
    at: float
    """Seconds since the epoch."""
    checkpoint: str | None
    digest: str | None
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InFlight:
    """One unfinished episode and what it waits for."""

    id: str
    """group.number.attempt"""
    waiting_for: str
    """"a place", "the reset", "tokens", "the step" or "tool NAME"."""
    turn: int
    since: float
    """Seconds since its last event."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at a glance; `str()` is a few lines for a terminal."""

    path: Path
    life: int
    alive: bool
    """A process has the run and has shown a sign of life of late."""
    last: StepRecord | None
    """The last step that a checkpoint covers."""
    step: int
    """The last committed step, covered or not."""
    groups: Mapping[str, int]
    """State -> number."""
    slots: Mapping[str, int]
    """State -> number, all attempts."""
    failures: Mapping[str, int]
    """Cause -> failed episodes, the commonest first."""
    in_flight: tuple[InFlight, ...]

    def __str__(self) -> str:
        def counts(of: Mapping[str, int]) -> str:
            return ", ".join(f"{name} {number}" for name, number in of.items()) or "none"

        lines = [
            f"{self.path}: {'running' if self.alive else 'not running'}, life {self.life}, step {self.step}"
            + (f" (checkpoint {self.last.checkpoint})" if self.last else ""),
            f"groups: {counts(self.groups)}",
            f"episodes: {counts(self.slots)}",
        ]
        waiting: dict[str, int] = {}
        for episode in self.in_flight:
            waiting[episode.waiting_for] = waiting.get(episode.waiting_for, 0) + 1
        if waiting:
            longest = max(self.in_flight, key=lambda episode: episode.since)
            lines.append(
                f"in flight, by what they wait for: {counts(waiting)}; longest: {longest.id}, {longest.waiting_for}, "
                f"turn {longest.turn}, {longest.since:.0f} s"
            )
        lines += [f"failed {number} times: {cause}" for cause, number in self.failures.items()]
        return "\n".join(lines)


def read_status(path: str | Path) -> RunStatus:
    """The status of the run whose journal is at `path`. Raises JournalError where there is none."""
    return _read(Path(path), lambda connection: run_status(connection, Path(path)))


def read_last_step(path: str | Path) -> StepRecord | None:
    """The last step that a checkpoint covers."""
    return _read(Path(path), last_step)


def read_steps(path: str | Path) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, metrics) of every committed step of the surviving lineage."""
    query = "SELECT step, metrics FROM steps ORDER BY step"
    return _read(Path(path), lambda c: [(step, orjson.loads(metrics)) for step, metrics in c.execute(query)])


def _read(path: Path, function: Callable[[sqlite3.Connection], T]) -> T:
    with closing(schema.read_only(path)) as connection:
        try:
            connection.execute("BEGIN")
            return function(connection)
        except sqlite3.Error as error:
            raise schema.damaged(path, error) from error


def last_step(connection: sqlite3.Connection) -> StepRecord | None:
    row = connection.execute(
        "SELECT step, life, at, checkpoint, digest, metrics FROM steps WHERE checkpoint IS NOT NULL "
        "ORDER BY step DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    step, life, at, checkpoint, digest, metrics = row
    return StepRecord(step, life, at, checkpoint, digest, orjson.loads(metrics))


def run_status(connection: sqlite3.Connection, path: Path) -> RunStatus:
    now = time.time()
    failures = connection.execute(
        "SELECT stop_reason, count(*) FROM slots WHERE state = 'failed' GROUP BY stop_reason ORDER BY 2 DESC LIMIT 20"
    )
    return RunStatus(
        path=path,
        life=_one(connection, "SELECT coalesce(max(life), 0) FROM lives"),
        alive=_alive(connection, now),
        last=last_step(connection),
        step=_one(connection, "SELECT coalesce(max(step), 0) FROM steps"),
        groups=dict(connection.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()),
        slots=dict(connection.execute("SELECT state, count(*) FROM slots GROUP BY state").fetchall()),
        failures=dict(failures.fetchall()),
        in_flight=tuple(_in_flight(connection, now)),
    )


def _alive(connection: sqlite3.Connection, now: float) -> bool:
    lease = connection.execute("SELECT host, pid, heartbeat FROM lease").fetchone()
    if lease is None or now - lease[2] > EXPIRY:
        return False
    if lease[0] != socket.gethostname():
        return True
    try:
        os.kill(lease[1], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _one(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def _in_flight(connection: sqlite3.Connection, now: float) -> list[InFlight]:
    slots = connection.execute(
        "SELECT id, group_id || '.' || number || '.' || attempt, state FROM slots "
        "WHERE state IN ('waiting', 'running') ORDER BY id"
    ).fetchall()
    episodes = []
    for slot, name, state in slots:
        last = connection.execute(
            "SELECT kind, at, data FROM events WHERE slot = ? ORDER BY id DESC LIMIT 1", (slot,)
        ).fetchone()
        turns = connection.execute("SELECT count(*) FROM events WHERE slot = ? AND kind = 'acted'", (slot,)).fetchone()[
            0
        ]
        if state == "waiting" or last is None:
            episodes.append(InFlight(name, "a place", 0, 0.0))
            continue
        kind, at, data = last
        waiting_for = {"begun": "the reset", "observed": "tokens", "sampled": "tokens"}.get(kind, "the step")
        if kind == "call_begun":
            waiting_for = f"tool {orjson.loads(data)[1]}"
        episodes.append(InFlight(name, waiting_for, turns, max(0.0, now - at)))
    return episodes
