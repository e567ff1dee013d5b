"""The audit names every promise that was broken, and nothing where none was."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from gspo_agent.errors import JournalError
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.events import Begun, CallBegun, Sampled
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import Segment, weight_version
from tests.rollout.moves import create, new_group
from tests.rollout.scene import Run, shopper

COPY = (
    "INSERT INTO events (slot, at, kind, data, token_ids, logprobs) "
    "SELECT slot, at, kind, data, token_ids, logprobs FROM events"
)
ATTEMPT = "INSERT INTO slots (id, group_id, number, attempt, seed, state) VALUES"


async def finished_run(path: Path) -> None:
    with Run(path, engine=ScriptedEngine(shopper, weight_version=weight_version(1, 0))) as run:
        await run.collector.start(0)
        for step in (1, 2):
            lease = await run.collector.lease(2, step=step)
            await run.ledger.commit_step(step, lease, (f"step-{step}", "hash"), {})
        await run.collector.stop()


async def test_a_call_that_may_run_again_may_begin_again(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with Journal.open(path) as journal:
        ledger = Ledger(journal)
        group = await create(ledger, new_group(0))
        ledger.begin(group.slots[0], Begun(0, "shop", 0, 1))
        for idempotent in (True, True, False):
            journal.append(1, CallBegun(f"call {idempotent}", "add", {}, idempotent))
    assert audit(path).breaches == ()
    with Journal.open(path) as journal:
        journal.append(1, CallBegun("call False", "add", {}, False))
    assert audit(path).breaches == ("slot 1: call call False of add was begun twice",)


async def test_requests_that_a_kill_may_have_cut_are_counted(fast_path: Path) -> None:
    """A life without an end was killed; the one after it sampled where a request of the dead one may have been."""
    path = fast_path / "journal.sqlite"
    for life in (1, 2, 3):
        with Journal.open(path) as journal:
            ledger = Ledger(journal)
            if life == 1:
                (slot, _) = (await create(ledger, new_group(0))).slots
                ledger.begin(slot, Begun(0, "shop", 0, 1))
            segment = Segment([1, 2], "policy", [-1.0] * 2, weight_version(life, 0))
            journal.append(1, Sampled(0, 2 * (life - 1), [segment], f"r{life}", None))
            if life == 2:
                journal.flush()
                shutil.copytree(fast_path, fast_path / "copy")
        if life == 2:
            path = fast_path / "copy" / "journal.sqlite"
    report = audit(path)
    assert (report.breaches, report.cut_requests, report.continued, report.sampled_tokens) == ((), 1, 1, 6)
    with Journal.open(path) as journal:
        Ledger(journal)
    assert "1 requests may have been cut by a kill" in str(audit(path))


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
        (f"{COPY} WHERE kind = 'sampled' LIMIT 1", "tokens sampled at"),
        (
            "INSERT INTO lives VALUES (2, 'host', 1, 0, 0, 1); "
            "UPDATE events SET data = CAST(replace(CAST(data AS TEXT), '1000000', '2000000') AS BLOB) "
            "WHERE id = (SELECT min(id) FROM events WHERE kind = 'sampled')",
            "a version of life 1 was used again in life 2",
        ),
        ("DELETE FROM lives; INSERT INTO lives VALUES (7, 'host', 1, 0, 0, 1)", "life 1 which never was"),
        ("DELETE FROM lives", "life 1 which never was"),
        (f"{COPY} WHERE kind = 'call_begun' LIMIT 1", "of add was begun twice"),
        (f"{COPY} WHERE kind = 'observed' LIMIT 1", "observed after its end"),
        ("UPDATE events SET slot = 99 WHERE slot = 1", "slot 99 has events, and there is no such slot"),
        ("DELETE FROM events WHERE kind = 'ended' AND slot = 1", "slot 1 is done, and its events do not end"),
        ("UPDATE slots SET versions = '{\"0\": 7}' WHERE id = 1", "slot 1 notes 7 sampled tokens"),
        ("UPDATE slots SET state = 'running' WHERE id = 1", "1 groups are over, and have unfinished slots"),
        ("UPDATE slots SET state = 'failed' WHERE id IN (1, 2)", "fewer scored members than min_group"),
        (f"{ATTEMPT} (99, 1, 0, 9, 0, 'done')", "1 members have two scored attempts"),
        (
            f"{ATTEMPT} (97, 1, 0, 7, 0, 'failed'), (98, 1, 0, 8, 0, 'failed'), (99, 1, 0, 9, 0, 'expired'), "
            "(100, 1, 0, 10, 0, 'expired')",
            "1 members have more failed and expired attempts than max_attempts",
        ),
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
