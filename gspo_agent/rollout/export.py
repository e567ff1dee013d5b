"""Episodes as Parquet, one row an attempt, in a folder that `datasets.load_dataset("parquet", data_dir=...)` reads."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import orjson

from gspo_agent.errors import ConfigError, JournalError, boundary
from gspo_agent.rollout import schema
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.events import fold
from gspo_agent.rollout.journal import read_events
from gspo_agent.rollout.leases import retired_step
from gspo_agent.trajectory import Trajectory

T = TypeVar("T")
Read = Callable[[Callable[[sqlite3.Connection], T]], T]
"""Runs a function on a connection to the journal."""
Record = Mapping[str, Any]
UNSETTLED = "unsettled.parquet"
"""Ended attempts of groups that no step has taken yet."""

_OF_STEP = (
    "SELECT groups.id FROM groups LEFT JOIN leases ON group_id = groups.id WHERE coalesce(leases.step, settled) = ? "
    "ORDER BY position IS NULL, position, groups.id"
)
_ATTEMPTS = (
    "SELECT slots.id AS slot, group_id, number AS 'index', attempt, slots.seed AS seed, source, cursor, spec, task, "
    "coalesce(leases.step, settled) AS step, max_weight_lag, ended AS ended_at, slots.state AS state, "
    "CASE slots.state WHEN 'done' THEN groups.state ELSE slots.state END AS outcome "
    "FROM slots JOIN groups ON groups.id = group_id LEFT JOIN leases USING (group_id) "
    "WHERE group_id = ? AND slots.state NOT IN ('waiting', 'running') ORDER BY number, attempt"
)


def columns() -> Any:
    """The Arrow schema of a row. [T] columns have one value a token.

    outcome: "consumed" (trained on in `step`), "filtered" (left out of it: equal rewards), "given_up" with its group;
    "failed", "expired" or "restarted" where another attempt took its place; "ready", "leased" or "open" before.
    task, messages, tools, rewards and metrics are JSON; rewards are [{turn, value, components}].
    max_weight_lag: tokens of weights more steps older than `step` were masked; null: none.
    """
    import pyarrow as pa

    tokens = {
        "token_ids": pa.int32(), "sampled": pa.bool_(), "rollout_logprobs": pa.float32(),
        "weight_versions": pa.int64(), "turns": pa.int32(),
    }  # fmt: skip
    plain = {
        "group_id": pa.int64(), "index": pa.int32(), "attempt": pa.int32(), "seed": pa.int64(), "source": pa.int32(),
        "cursor": pa.int64(), "spec": pa.string(), "step": pa.int64(), "outcome": pa.string(),
        "status": pa.string(), "stop_reason": pa.string(), "reward": pa.float64(), "rewards": pa.string(),
        "metrics": pa.string(), "max_weight_lag": pa.int64(), "ended_at": pa.float64(), "task": pa.string(),
        "tools": pa.string(), "messages": pa.string(),
    }  # fmt: skip
    return pa.schema([*plain.items(), *((name, pa.list_(of)) for name, of in tokens.items())])


def check_available() -> None:
    """Raises ConfigError where the package that writes Parquet is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("episodes are exported with pyarrow, which is not installed; pip install 'gspo_agent[data]'")


def step_file(step: int) -> str:
    return f"step-{step:06d}.parquet"


def export_step(
    read: Read[Any], blobs: BlobStore, step: int, directory: Path, go_on: Callable[[], bool] = lambda: True
) -> int:
    """Writes the attempts of the groups that `step` settled; returns how many. The same step gives the same bytes.

    Blocks, and reads one group at a time. Stops between two of them, leaving no file, where `go_on` turns False.
    """
    group_ids = read(lambda c: [group_id for (group_id,) in c.execute(_OF_STEP, (step,))])
    return _write(directory / step_file(step), (_records(read, blobs, group) for group in group_ids if go_on()), go_on)


def export_run(journal: Path, directory: Path) -> dict[str, int]:
    """Writes what the journal holds now, also while its run is alive: file name -> rows.

    One file a step, and one for what no step has taken. Raises JournalError where there is no journal, ConfigError
    where `directory` is the one that the run itself writes to.
    """
    check_available()
    if directory.resolve() == (journal.parent / "episodes").resolve():
        raise ConfigError(f"{str(directory)!r} is where the run itself writes; export to another directory")
    blobs = BlobStore(journal.parent / "blobs")
    written: dict[str, int] = {}
    with closing(schema.read_only(journal)) as connection:
        connection.execute("BEGIN")
        read: Read[Any] = lambda function: function(connection)  # noqa: E731
        steps = (
            "SELECT DISTINCT coalesce(leases.step, settled) FROM groups LEFT JOIN leases ON group_id = groups.id "
            "WHERE coalesce(leases.step, settled) > ? ORDER BY 1"
        )
        for (step,) in connection.execute(steps, (retired_step(connection),)).fetchall():
            written[step_file(step)] = export_step(read, blobs, step, directory)
        others = connection.execute("SELECT id FROM groups WHERE state IN ('open', 'ready') ORDER BY id").fetchall()
        records = (_records(read, blobs, group) for (group,) in others)
        written[UNSETTLED] = _write(directory / UNSETTLED, records)
    return written


def _records(read: Read[Any], blobs: BlobStore, group_id: int) -> list[Record]:
    """The ended attempts of one group; read at once, so that what is read belongs together."""

    def attempts(connection: sqlite3.Connection) -> list[Record]:
        rows = connection.execute(_ATTEMPTS, (group_id,))
        names = [name for name, *_ in rows.description]
        return [_record(connection, blobs, dict(zip(names, row, strict=True))) for row in rows.fetchall()]

    records: list[Record] = read(attempts)
    return records


def _record(connection: sqlite3.Connection, blobs: BlobStore, attempt: dict[str, Any]) -> Record:
    blank = Trajectory(attempt["group_id"], attempt["index"], attempt["attempt"], attempt["seed"])
    episode = fold(blank, read_events(connection, attempt["slot"], blobs))
    trajectory = episode.trajectory
    rows = trajectory.rows()
    views = ("token_ids", "sampled", "rollout_logprobs", "weight_versions", "turns")
    tokens = {name: getattr(rows[0], name) if rows else [] for name in views}
    rewards = [{"turn": r.turn, "value": r.value, "components": dict(r.components)} for r in trajectory.rewards]
    return attempt | tokens | {
        "task": bytes(attempt["task"]).decode(),
        "messages": orjson.dumps(trajectory.messages).decode(),
        "tools": orjson.dumps(episode.tools).decode(),
        "rewards": orjson.dumps(rewards).decode(),
        "metrics": orjson.dumps(trajectory.metrics).decode(),
        # What failed or was begun again has no reward; half of one would only look like it.
        "reward": trajectory.reward if attempt["state"] in ("done", "expired") else None,
        "status": trajectory.status.value,
        "stop_reason": trajectory.stop_reason,
    }  # fmt: skip


def _write(path: Path, groups: Iterable[Sequence[Record]], go_on: Callable[[], bool] = lambda: True) -> int:
    """Durable when it returns: written beside, synced, renamed. A kill leaves a hidden file that nobody reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names, number = columns(), 0
    with boundary(JournalError, f"{path} cannot be written; free some space and run the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with open(handle, "wb") as file:
                with pq.ParquetWriter(file, names, compression="zstd") as writer:
                    for records in groups:
                        number += len(records)
                        data = {name: [record[name] for record in records] for name in names.names}
                        writer.write_table(pa.table(data, schema=names))
                file.flush()
                os.fsync(file.fileno())
            if go_on():
                os.chmod(temporary, 0o644)
                os.replace(temporary, path)
                _sync(path.parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return number


def discard_leftovers(directory: Path) -> None:
    """What a killed process left unfinished."""
    for leftover in directory.glob(".*.parquet.*.tmp"):
        leftover.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
