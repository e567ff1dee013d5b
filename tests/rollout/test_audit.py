"""The audit names every promise that was broken, and nothing where none was."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gspo_agent.errors import JournalError
from gspo_agent.rollout.audit import audit
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import weight_version
from tests.rollout.scene import Run, shopper


async def finished_run(path: Path) -> None:
    with Run(path, engine=ScriptedEngine(shopper, weight_version=weight_version(1, 0))) as run:
        await run.collector.start(0)
        for step in (1, 2):
            lease = await run.collector.lease(2, step=step)
            await run.ledger.commit_step(step, lease, (f"step-{step}", "hash"), {})
        await run.collector.stop()


async def test_a_run_that_kept_its_promises_has_no_breach(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    await finished_run(path)
    report = audit(path)
    assert report.breaches == ()
    assert (report.lives, report.steps, report.groups["consumed"]) == (1, 2, 4)
    assert report.tasks == sum(report.groups.values())


@pytest.mark.parametrize(
    ("damage", "breach"),
    [
        ("UPDATE cursors SET cursor = cursor + 1", "were taken and have no group"),
        ("UPDATE groups SET cursor = 0 WHERE id = 2", "a task has two groups"),
        ("UPDATE groups SET state = 'open' WHERE id = 1", "no unfinished slot"),
        ("DELETE FROM steps WHERE step = 1", "gaps"),
        ("UPDATE groups SET state = 'ready' WHERE id = 1", "in a durable step and not settled"),
        ("UPDATE steps SET checkpoint = NULL WHERE step = 2", "settled without a durable step"),
        (
            "INSERT INTO events (slot, at, kind, data, token_ids, logprobs) SELECT slot, at, kind, data, token_ids, "
            "logprobs FROM events WHERE kind = 'sampled' LIMIT 1",
            "tokens sampled at",
        ),
        (
            "INSERT INTO lives VALUES (2, 'host', 1, 0, 0, 1); "
            "UPDATE events SET data = CAST(replace(CAST(data AS TEXT), '1000000', '2000000') AS BLOB) "
            "WHERE id = (SELECT min(id) FROM events WHERE kind = 'sampled')",
            "a version of life 1 was used again in life 2",
        ),
        ("DELETE FROM lives; INSERT INTO lives VALUES (7, 'host', 1, 0, 0, 1)", "which never were"),
    ],
)
async def test_every_breach_is_named(fast_path: Path, damage: str, breach: str) -> None:
    path = fast_path / "journal.sqlite"
    await finished_run(path)
    connection = sqlite3.connect(path)
    connection.executescript(damage)
    connection.close()
    assert [text for text in audit(path).breaches if breach in text], audit(path)


def test_an_audit_of_nothing_says_so(fast_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        audit(fast_path / "journal.sqlite")
