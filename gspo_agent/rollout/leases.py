"""Leases: which groups a training step gets, and what its commit does with them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gspo_agent.errors import JournalError
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.events import fold
from gspo_agent.rollout.groups import Ready, ready_groups
from gspo_agent.rollout.journal import read_events
from gspo_agent.trajectory import Group, Trajectory, version_step


@dataclass(frozen=True, slots=True)
class Lease:
    """The groups of one training step, in the recorded order; the same after any restart."""

    step: int
    groups: Sequence[Group]
    filtered: Sequence[Group]
    """Groups without variance: left out of training and settled with this step, but part of what the policy did."""
    max_weight_lag: int | None
    """Tokens of an older step are masked; decided when the lease was made, whatever the configuration says now."""
    masked_tokens: int
    """Sampled tokens that this masks."""


def choose(ready: Sequence[Ready], num_groups: int, max_filtered: int) -> list[tuple[int, bool]] | None:
    """(group id, filtered) in order, until `num_groups` are to be trained on; None where there are too few."""
    chosen: list[tuple[int, bool]] = []
    filtered = 0
    for group in ready:
        leave_out = group.flat and filtered < max_filtered
        filtered += leave_out
        chosen.append((group.id, leave_out))
        if len(chosen) - filtered == num_groups:
            return chosen
    return None


def take_lease(
    connection: sqlite3.Connection,
    blobs: BlobStore,
    step: int,
    num_groups: int,
    max_filtered: int,
    max_weight_lag: int | None,
    finished: Mapping[int, Sequence[Trajectory]],
) -> Lease | None:
    if connection.execute("SELECT 1 FROM steps WHERE step = ?", (step,)).fetchone():
        raise JournalError(f"step {step} is committed; it cannot be leased again")
    if not connection.execute("SELECT 1 FROM leases WHERE step = ?", (step,)).fetchone():
        chosen = choose(ready_groups(connection), num_groups, max_filtered)
        if chosen is None:
            return None
        connection.executemany(
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?)",
            [(step, n, group_id, filtered, max_weight_lag) for n, (group_id, filtered) in enumerate(chosen)],
        )
        connection.executemany("UPDATE groups SET state = 'leased' WHERE id = ?", [(g,) for g, _ in chosen])
    rows = connection.execute(
        "SELECT group_id, filtered, max_weight_lag FROM leases WHERE step = ? ORDER BY position", (step,)
    ).fetchall()
    groups: list[Group] = []
    filtered: list[Group] = []
    for group_id, left_out, _ in rows:
        group = _read_group(connection, blobs, group_id, finished.get(group_id, ()))
        (filtered if left_out else groups).append(group)
    lag = rows[0][2]
    return Lease(step, groups, filtered, lag, _masked_tokens(groups, step, lag))


def _read_group(
    connection: sqlite3.Connection, blobs: BlobStore, group_id: int, finished: Sequence[Trajectory]
) -> Group:
    """The group with its scored members; those that this life finished need not be read back."""
    (task,) = connection.execute("SELECT task FROM groups WHERE id = ?", (group_id,)).fetchone()
    rows = connection.execute(
        "SELECT id, number, attempt, seed FROM slots WHERE group_id = ? AND state = 'done' ORDER BY number",
        (group_id,),
    ).fetchall()
    known = {(t.index, t.attempt): t for t in finished}
    trajectories = [
        known.get((number, attempt))
        or fold(Trajectory(group_id, number, attempt, seed), read_events(connection, slot, blobs)).trajectory
        for slot, number, attempt, seed in rows
    ]
    return Group(group_id, orjson.loads(task), trajectories)


def _masked_tokens(groups: Sequence[Group], step: int, max_weight_lag: int | None) -> int:
    """Lag is 1 for a token of the weights that the step starts from, as in `learner.batch`."""
    if max_weight_lag is None:
        return 0
    segments = (s for group in groups for trajectory in group.trajectories for s in trajectory.segments)
    return sum(
        len(segment)
        for segment in segments
        if segment.weight_version is not None and step - version_step(segment.weight_version) > max_weight_lag
    )


def commit_step(
    connection: sqlite3.Connection,
    life: int,
    step: int,
    lease: Lease,
    checkpoint: tuple[str, str] | None,
    metrics: Mapping[str, Any],
) -> None:
    recorded = [group_id for (group_id,) in connection.execute(
        "SELECT group_id FROM leases WHERE step = ? AND NOT filtered ORDER BY position", (step,)
    )]  # fmt: skip
    if not recorded or recorded != [group.id for group in lease.groups]:
        raise JournalError(f"step {step} was leased groups {recorded}, not {[group.id for group in lease.groups]}")
    (newest,) = connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
    if step != newest + 1:
        raise JournalError(f"step {step} cannot follow step {newest}")
    name, digest = checkpoint or (None, None)
    packed = orjson.dumps(metrics, option=orjson.OPT_SERIALIZE_NUMPY)
    connection.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", (step, life, time.time(), name, digest, packed))
    if checkpoint is not None:
        connection.execute(
            "UPDATE groups SET state = CASE (SELECT filtered FROM leases WHERE group_id = id) "
            "WHEN 1 THEN 'filtered' ELSE 'consumed' END, "
            "settled = (SELECT step FROM leases WHERE group_id = id) "
            "WHERE state = 'leased' AND id IN (SELECT group_id FROM leases WHERE step <= ?)",
            (step,),
        )


def forget_uncovered(connection: sqlite3.Connection, life: int) -> None:
    """Steps of earlier lives that no checkpoint covers: they will be done again."""
    connection.execute(
        "DELETE FROM steps WHERE life < ? "
        "AND step > (SELECT coalesce(max(step), 0) FROM steps WHERE checkpoint IS NOT NULL)",
        (life,),
    )


def roll_back(connection: sqlite3.Connection, life: int, step: int) -> None:
    if (
        step
        and not connection.execute("SELECT 1 FROM steps WHERE step = ? AND checkpoint NOT NULL", (step,)).fetchone()
    ):
        raise JournalError(f"step {step} has no checkpoint; the run cannot be rolled back to it")
    if connection.execute("SELECT 1 FROM steps WHERE step > ? AND life = ?", (step, life)).fetchone():
        raise JournalError(f"this process has trained steps after {step} itself; stop it, and roll back at a new start")
    gone = retired_step(connection)
    if gone > step:
        raise JournalError(
            f"the episodes of steps up to {gone} have left the journal; the run cannot be rolled back to step {step}"
        )
    (newest,) = connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
    connection.execute("INSERT INTO rollbacks VALUES (?, ?, ?, ?)", (life, time.time(), newest, step))
    connection.execute("DELETE FROM steps WHERE step > ?", (step,))
    connection.execute(
        "UPDATE groups SET state = 'leased', settled = NULL WHERE id IN (SELECT group_id FROM leases WHERE step > ?)",
        (step,),
    )


def retired_step(connection: sqlite3.Connection) -> int:
    """The last step of which episodes have begun to leave the journal."""
    # The mark is an event of no slot, so that the ids of the log are never used again.
    (step,) = connection.execute(
        "SELECT coalesce(max(CAST(CAST(data AS TEXT) AS INTEGER)), 0) FROM events WHERE slot = 0"
    ).fetchone()
    return int(step)
