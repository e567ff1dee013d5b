"""What a run is doing, read from its file, also while another process writes it."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from gspo_agent.rollout import schema, tallies
from gspo_agent.rollout.events import Sampled
from gspo_agent.rollout.owner import Owner

T = TypeVar("T")
_SHOWN = 5
COUNT = "count/"
"""Metrics of environments that begin with it are added up: "count/verdict/equal:num" counts verdicts by reason."""


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


class InFlight(NamedTuple):
    """One unfinished episode and what it waits for."""

    id: str
    """group.number.attempt"""
    waiting_for: str
    """"a place", "another attempt", "the environment", "the reset", "a quota", "the journal", "tokens", "the learner"
    (the engine is paused), "tool NAME", "the step" or "the judge"."""
    turn: int
    since: float
    """For so many seconds, as of the moment at which this was looked at."""
    unjournaled: int = 0
    """Tokens that it has sampled and that are not on disk yet."""


class GivenUp(NamedTuple):
    """A group that had too few scored members when its attempts were used up."""

    id: int
    source: int
    cursor: int
    """Its task."""
    cause: str
    """Of its last failure."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its journal has it; `str()` is a few lines for a terminal."""

    owner: Owner
    state: str
    """"running", "stopped", "died" or "silent", see `Owner.state`."""
    last: StepRecord | None
    """The last step that a checkpoint covers."""
    step: int
    """The last committed step, covered or not."""
    groups: Mapping[str, int]
    """State -> number."""
    slots: Mapping[str, int]
    """State -> number, all attempts."""
    retries: Mapping[int, int]
    """Attempt from the second on (1) -> episodes."""
    failures: Mapping[str, int]
    """Cause -> failed episodes, the commonest first; at most 20."""
    given_up: tuple[GivenUp, ...]
    """The newest 20."""
    staleness: Mapping[str, Mapping[int, int]]
    """"last step" and "ready" -> lag in steps -> sampled tokens. A token of the weights that a step starts from has
    lag 1; ready groups count as if the next step took them."""
    in_flight: tuple[InFlight, ...]
    counted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What environments count -> name -> number, over all committed steps, the most frequent first."""

    @property
    def life(self) -> int:
        return self.owner.life

    @property
    def alive(self) -> bool:
        return self.state == "running"

    def __str__(self) -> str:
        head = f"{self.state.replace('stopped', 'not running')}, life {self.life}, step {self.step}"
        if self.last:
            head += f" (checkpoint {self.last.checkpoint})"
        return "\n".join([head, *self.lines(), *waiting_lines(self.in_flight)])

    def lines(self) -> list[str]:
        """Groups, episodes and failures."""
        lines = [f"groups: {counts(self.groups)}", f"episodes: {counts(self.slots)}"]
        if self.retries:
            more = ", ".join(f"{number} in attempt {attempt + 1}" for attempt, number in self.retries.items())
            lines[-1] += f"; tried again: {more}"
        lines += [f"{what}: {counts(names)}" for what, names in self.counted.items()]
        lines += [f"failed {number} times: {cause}" for cause, number in self.failures.items()]
        lines += [
            f"given up: group {group.id} (task {group.cursor} of [[env]] {group.source}), {group.cause}"
            for group in self.given_up[:_SHOWN]
        ]
        return lines


def counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in of.items()) or "none"


def waiting_lines(in_flight: Sequence[InFlight], shown: int | None = _SHOWN) -> list[str]:
    """How many wait for what, and the `shown` that have waited longest; None: all of them."""
    if not in_flight:
        return []
    waiting = Counter(episode.waiting_for for episode in in_flight)
    longest = sorted(in_flight, key=lambda episode: -episode.since)[:shown]
    width = max(len(episode.id) for episode in longest)
    what = max(len(episode.waiting_for) for episode in longest)
    return [
        f"in flight, by what they wait for: {counts(dict(waiting.most_common()))}",
        *(
            f"  {episode.id:<{width}}  {episode.waiting_for:<{what}}  turn {episode.turn}  {episode.since:.0f} s"
            + (f"  {episode.unjournaled} tokens not journaled" if episode.unjournaled else "")
            for episode in longest
        ),
    ]


def read_status(path: str | Path, timeout: float | None = None) -> RunStatus:
    """The status of the run whose journal is at `path`. Raises JournalError where there is none, and where another
    process has it for itself for longer than `timeout` seconds."""
    return _read(Path(path), lambda connection: run_status(connection, Path(path)), timeout)


def read_last_step(path: str | Path) -> StepRecord | None:
    """The last step that a checkpoint covers."""
    return _read(Path(path), last_step)


def read_steps(path: str | Path) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, metrics) of every committed step of the surviving lineage."""
    query = "SELECT step, metrics FROM steps ORDER BY step"
    return _read(Path(path), lambda c: [(step, orjson.loads(metrics)) for step, metrics in c.execute(query)])


def _read(path: Path, function: Callable[[sqlite3.Connection], T], timeout: float | None = None) -> T:
    with closing(schema.read_only(path, timeout)) as connection:
        try:
            connection.execute("BEGIN")
            return function(connection)
        except sqlite3.Error as error:
            raise schema.damaged(path, error) from error


def covered_steps(connection: sqlite3.Connection, most: int = -1) -> list[StepRecord]:
    """The steps that have a checkpoint of their own, the newest first."""
    rows = connection.execute(
        "SELECT step, life, at, checkpoint, digest, metrics FROM steps WHERE checkpoint IS NOT NULL "
        "ORDER BY step DESC LIMIT ?",
        (most,),
    )
    return [
        StepRecord(step, life, at, checkpoint, digest, orjson.loads(metrics))
        for step, life, at, checkpoint, digest, metrics in rows
    ]


def last_step(connection: sqlite3.Connection) -> StepRecord | None:
    return next(iter(covered_steps(connection, 1)), None)


def run_status(connection: sqlite3.Connection, path: Path, *, in_flight: bool = True) -> RunStatus:
    """`in_flight`: whether to read what each unfinished episode waits for, and the metrics of all steps; that takes a
    few queries for each."""
    owner = _owner(connection)
    step = _one(connection, "SELECT coalesce(max(step), 0) FROM steps")
    return RunStatus(
        owner=owner,
        state=owner.state(path),
        last=last_step(connection),
        step=step,
        groups=tallies.group_states(connection),
        slots=tallies.slot_states(connection),
        retries=_pairs(connection, "SELECT attempt, count(*) FROM slots WHERE attempt > 0 GROUP BY attempt"),
        failures=dict(list(tallies.failures(connection).items())[:20]),
        given_up=tuple(_given_up(connection)),
        staleness=_staleness(connection, step),
        in_flight=tuple(_in_flight(connection, time.time())) if in_flight else (),
        counted=_counted(connection) if in_flight else {},
    )


def _counted(connection: sqlite3.Connection) -> dict[str, dict[str, int]]:
    counted: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (metrics,) in connection.execute("SELECT metrics FROM steps"):
        for name, number in orjson.loads(metrics).items():
            if name.startswith(COUNT):
                what, _, of = name.removeprefix(COUNT).rpartition("/")
                counted[what or "counted"][of] += round(number)
    return {what: dict(names.most_common()) for what, names in sorted(counted.items())}


def _owner(connection: sqlite3.Connection) -> Owner:
    life = connection.execute("SELECT life, host, pid, began, ended FROM lives ORDER BY life DESC LIMIT 1").fetchone()
    if life is None:
        return Owner(0, "", 0, 0.0, ended=True)
    number, host, pid, began, ended = life
    beat = connection.execute("SELECT heartbeat FROM lease WHERE life = ?", (number,)).fetchone()
    return Owner(number, host, pid, max(began, ended or 0.0, beat[0] if beat else 0.0), ended is not None)


def _pairs(connection: sqlite3.Connection, query: str) -> dict[Any, int]:
    return dict(connection.execute(query).fetchall())


def _one(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def _given_up(connection: sqlite3.Connection) -> Iterator[GivenUp]:
    rows = connection.execute(
        "SELECT id, source, cursor, (SELECT stop_reason FROM slots WHERE group_id = groups.id AND state = 'failed' "
        "ORDER BY id DESC LIMIT 1) FROM groups WHERE state = 'given_up' ORDER BY id DESC LIMIT 20"
    )
    for group, source, cursor, cause in rows:
        yield GivenUp(group, source, cursor, cause or "no cause is recorded")


def _staleness(connection: sqlite3.Connection, step: int) -> dict[str, dict[int, int]]:
    sampled = "SELECT versions FROM slots JOIN {} WHERE slots.state = 'done' AND versions NOT NULL AND {}"
    last = sampled.format("leases USING (group_id)", f"step = {step} AND NOT filtered")
    ready = sampled.format("groups ON groups.id = group_id", "groups.state = 'ready'")
    return {
        "last step": lags(_versions(connection, last), step),
        "ready": lags(_versions(connection, ready), step + 1),
    }


def _versions(connection: sqlite3.Connection, query: str) -> Iterator[tuple[int, int]]:
    for (versions,) in connection.execute(query):
        for weights, tokens in orjson.loads(versions).items():
            yield int(weights), tokens


def lags(versions: Iterable[tuple[int, int]], step: int) -> dict[int, int]:
    """(step of the weights, tokens) -> lag behind `step` -> tokens, the freshest first."""
    histogram: Counter[int] = Counter()
    for weights, tokens in versions:
        histogram[step - weights] += tokens
    return dict(sorted(histogram.items()))


def _in_flight(connection: sqlite3.Connection, now: float) -> Iterator[InFlight]:
    rows = connection.execute(
        "SELECT group_id || '.' || number || '.' || attempt, slots.state, kind, at, "
        "CASE WHEN kind IN ('call_begun', 'sampled') THEN data END, "
        "(SELECT count(*) FROM events WHERE slot = slots.id AND kind = 'observed') FROM slots LEFT JOIN events "
        "ON events.id = (SELECT id FROM events WHERE slot = slots.id AND kind != 'spent' ORDER BY id DESC LIMIT 1) "
        "WHERE slots.state IN ('waiting', 'running') ORDER BY slots.id"
    )
    for name, state, kind, at, data, turns in rows:
        if state == "waiting" or kind is None:
            yield InFlight(name, "a place", 0, 0.0)
            continue
        waiting_for = {"begun": "the reset", "observed": "tokens"}.get(kind, "the step")
        if kind == "call_begun":
            waiting_for = f"tool {orjson.loads(data)[1]}"
        elif kind == "sampled" and Sampled.goes_on(data):
            waiting_for = "tokens"
        yield InFlight(name, waiting_for, turns, max(0.0, now - at))
