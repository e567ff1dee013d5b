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
from gspo_agent.rollout.jobs import insert
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
        rows = [(step, n, group_id, filtered, max_weight_lag) for n, (group_id, filtered) in enumerate(chosen)]
        insert(connection, "leases (step, position, group_id, filtered, max_weight_lag)", rows)
        connection.execute(
            "UPDATE groups SET state = 'leased' WHERE id IN (SELECT group_id FROM leases WHERE step = ?)", (step,)
        )
    groups: list[Group] = []
    filtered: list[Group] = []
    for group, left_out in _read_groups(connection, blobs, step, finished):
        (filtered if left_out else groups).append(group)
    (lag,) = connection.execute("SELECT max(max_weight_lag) FROM leases WHERE step = ?", (step,)).fetchone()
    return Lease(step, groups, filtered, lag, _masked_tokens(groups, step, lag))


def _read_groups(
    connection: sqlite3.Connection, blobs: BlobStore, step: int, finished: Mapping[int, Sequence[Trajectory]]
) -> list[tuple[Group, bool]]:
    """The groups with their scored members, and whether they are left out; what this life finished is not read back."""
    # One row for all, because every row that is fetched gives up the interpreter's lock.
    (leased,) = connection.execute(
        "SELECT group_concat(json_array(position, group_id, filtered) || ',' || CAST(task AS TEXT)) "
        "FROM leases JOIN groups ON groups.id = group_id WHERE step = ?",
        (step,),
    ).fetchone()
    (members,) = connection.execute(
        "SELECT json_group_array(json_array(group_id, number, attempt, slots.seed, slots.id)) "
        "FROM leases JOIN slots USING (group_id) WHERE step = ? AND state = 'done'",
        (step,),
    ).fetchone()
    scored: dict[int, list[Trajectory]] = {}
    for group_id, number, attempt, seed, slot in sorted(orjson.loads(members)):
        known = (t for t in finished.get(group_id, ()) if (t.index, t.attempt) == (number, attempt))
        trajectory = (
            next(known, None)
            or fold(Trajectory(group_id, number, attempt, seed), read_events(connection, slot, blobs)).trajectory
        )
        scored.setdefault(group_id, []).append(trajectory)
    parts = orjson.loads(f"[{leased}]")
    return [
        (Group(group_id, task, scored.get(group_id, [])), bool(left_out))
        for (_, group_id, left_out), task in sorted(zip(parts[::2], parts[1::2], strict=True))
    ]


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
