"""What left the journal is kept as files and counts: nothing is lost, exported twice or forgotten by an audit."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gspo_agent.errors import JournalError
from gspo_agent.rollout import export, retention, schema
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.events import CallBegun
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger, read_status
from gspo_agent.rollout.retention import Retention, retire
from tests.rollout.moves import begin, create, end, new_group, play, train
from tests.rollout.scene import until

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def journal(fast_path: Path) -> Iterator[Journal]:
    with Journal.open(fast_path / "journal.sqlite") as opened:
        yield opened


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def count(journal: Journal, table: str) -> int:
    return int(journal.submit(lambda c: c.execute(f"SELECT count(*) FROM {table}").fetchone()).result(5)[0])


async def test_old_steps_leave_and_what_a_rollback_needs_stays(journal: Journal, fast_path: Path) -> None:
    ledger = Ledger(journal)
    await train(ledger, 1, 2, 3, 4, 5, 6)
    assert await retire(journal, oldest_checkpoint=6, keep_steps="all") == []
    assert await retire(journal, oldest_checkpoint=None, keep_steps=0) == []
    assert await retire(journal, oldest_checkpoint=2, keep_steps=1) == [1, 2]
    assert await retire(journal, oldest_checkpoint=6, keep_steps=2) == [3, 4]
    assert (count(journal, "groups"), count(journal, "slots"), count(journal, "leases")) == (2, 4, 2)
    assert journal.submit(lambda c: c.execute("SELECT * FROM retired").fetchall()).result(5) == [(0, 0, 3)]


async def test_a_run_cannot_be_rolled_back_to_where_episodes_have_left(fast_path: Path) -> None:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        await train(Ledger(journal), 1, 2, 3)
        await retire(journal, oldest_checkpoint=2, keep_steps=0)
    with Journal.open(fast_path / "journal.sqlite") as journal:
        ledger = Ledger(journal)
        with pytest.raises(JournalError, match="steps up to 2 have left the journal"):
            await ledger.roll_back(1)
        await ledger.roll_back(2)
        assert ledger.pending_leases() == [3]


async def test_status_and_audit_say_the_same_before_and_after(journal: Journal) -> None:
    ledger = Ledger(journal)
    group = await create(ledger, new_group(0))
    for slot in group.slots:
        begin(ledger, slot)
        retry = end(ledger, slot, None).retry
        assert retry is not None
        begin(ledger, retry)
        end(ledger, retry, None)
    await train(ledger, 1, 2, 3, filtered=True)
    before, status = audit(journal.path), ledger.status()
    assert before.breaches == ()
    assert dict(before.groups) == {"consumed": 3, "filtered": 3, "given_up": 1}
    assert await retire(journal, oldest_checkpoint=3, keep_steps=0) == [1, 2, 3]
    after = audit(journal.path)
    assert (count(journal, "groups"), count(journal, "slots"), after.retired) == (0, 0, 7)
    for name in ("lives", "steps", "tasks", "groups", "slots", "continued", "sampled_tokens", "breaches"):
        assert getattr(after, name) == getattr(before, name), name
    again = ledger.status()
    assert (again.groups, again.slots, again.failures) == (status.groups, status.slots, status.failures)
    assert "the episodes of 7 groups have left the journal" in str(after)


async def test_ids_are_never_used_again(journal: Journal) -> None:
    ledger = Ledger(journal)
    await train(ledger, 1)
    newest = journal.submit(lambda c: c.execute("SELECT max(id) FROM events").fetchone()[0]).result(5)
    await retire(journal, oldest_checkpoint=1, keep_steps=0)
    group = await create(ledger, new_group(1))
    assert (group.id, [slot.id for slot in group.slots]) == (2, [3, 4])
    begin(ledger, group.slots[0])
    assert count(journal, f"events WHERE id <= {newest}") == 0
    assert count(journal, "events") == 2


async def test_a_breach_is_remembered_when_its_episode_has_left(journal: Journal) -> None:
    ledger = Ledger(journal)
    await train(ledger, 1)
    journal.append(1, CallBegun("a", "f", {}), CallBegun("a", "f", {}))
    journal.submit(lambda c: c.execute("UPDATE slots SET state = 'failed' WHERE id = 2")).result(5)
    before = set(audit(journal.path).breaches)
    assert any("call a of f was begun twice" in breach for breach in before)
    assert "1 groups were handed out with fewer scored members than min_group" in before
    await retire(journal, oldest_checkpoint=1, keep_steps=0)
    assert count(journal, "slots") == 0
    assert set(audit(journal.path).breaches) == before


async def test_a_task_that_vanished_or_came_back_is_named_after_retirement_too(journal: Journal) -> None:
    ledger = Ledger(journal)
    await train(ledger, 1, 2)
    await retire(journal, oldest_checkpoint=2, keep_steps=0)
    journal.submit(lambda c: c.execute("UPDATE retired SET last = 0")).result(5)
    assert audit(journal.path).breaches == ("source 0: tasks [1] were taken and have no group",)
    journal.submit(lambda c: c.execute("UPDATE retired SET last = 1")).result(5)
    await train(ledger, 3)
    journal.submit(lambda c: c.execute("UPDATE groups SET cursor = 0; ")).result(5)
    assert "source 0: a task has two groups" in audit(journal.path).breaches


async def test_the_file_stops_growing(journal: Journal) -> None:
    """What stays is a row for each step; fifty more of them need no page for episodes."""
    ledger, pages = Ledger(journal), []
    for step in range(1, 81):
        await play(ledger, await create(ledger, new_group(step - 1)), 0.0, 1.0, tokens=20)
        lease = await ledger.lease(step, 1, max_filtered=0)
        assert lease is not None
        await ledger.commit_step(step, lease, (f"step-{step}", "hash"))
        await retire(journal, oldest_checkpoint=step, keep_steps=5)
        pages.append(journal.submit(lambda c: c.execute("PRAGMA page_count").fetchone()[0]).result(5))
    assert pages[79] <= pages[29] + 2, pages
    assert pages[29] < 40
    assert audit(journal.path).breaches == ()


async def test_an_exported_row_has_all_that_the_episode_was(journal: Journal, fast_path: Path) -> None:
    ledger = Ledger(journal)
    group = await create(ledger, new_group(0))
    begin(ledger, group.slots[0])
    retry = end(ledger, group.slots[0], None).retry
    assert retry is not None
    await play(ledger, group._replace(slots=[retry, group.slots[1]]), 0.0, 1.0)
    await play(ledger, await create(ledger, new_group(1)), 1.0, 1.0)
    lease = await ledger.lease(1, 1, max_filtered=0, max_weight_lag=8)
    assert lease is not None
    await ledger.commit_step(1, lease)
    await train(ledger, 2)
    out = fast_path / "episodes"
    await retire(journal, oldest_checkpoint=2, keep_steps=0, export=out)
    assert sorted(path.name for path in out.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    first = rows(out / "step-000001.parquet")
    keys = ("group_id", "index", "attempt", "outcome", "status", "reward", "step", "cursor", "max_weight_lag")
    assert [tuple(row[key] for key in keys) for row in first] == [
        (1, 0, 0, "failed", "failed", None, 1, 0, 8),
        (1, 0, 1, "consumed", "terminated", 0.0, 1, 0, 8),
        (1, 1, 0, "consumed", "terminated", 1.0, 1, 0, 8),
    ]
    row = first[2]
    assert row["token_ids"] == [7, 8, 1, 2, 3]
    assert row["sampled"] == [False, False, True, True, True]
    assert row["rollout_logprobs"] == [0.0, 0.0, -1.0, -1.0, -1.0]
    assert row["weight_versions"] == [-1, -1, 1_000_000, 1_000_000, 1_000_000]
    assert row["turns"] == [0] * 5
    assert (orjson.loads(row["task"]), row["spec"], row["stop_reason"]) == ({"n": 0}, "shop", "because")
    assert orjson.loads(row["messages"]) == [{"role": "user", "content": "hi"}]
    assert orjson.loads(row["rewards"]) == [{"turn": None, "value": 1.0, "components": {}}]
    last = [(row["group_id"], row["outcome"]) for row in rows(out / "step-000002.parquet")]
    assert last == [(2, "filtered")] * 2 + [(3, "consumed")] * 2


async def test_a_folder_of_exports_is_a_data_set(journal: Journal, fast_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    ledger = Ledger(journal)
    await train(ledger, 1, 2, filtered=True)
    await retire(journal, oldest_checkpoint=2, keep_steps=0, export=fast_path / "episodes")
    (fast_path / "episodes" / ".step-000003.parquet.x.tmp").write_bytes(b"left by a kill")
    data = datasets.load_dataset("parquet", data_dir=str(fast_path / "episodes"), cache_dir=str(fast_path / "cache"))
    assert sorted(data["train"]["outcome"]) == ["consumed"] * 4 + ["filtered"] * 4


class Cut(Exception):
    """A kill, at a place of the test's choice."""


@pytest.mark.parametrize("place", [*range(6), 9, 10, 11, 13, 16, 18])
async def test_a_kill_anywhere_loses_nothing_and_exports_nothing_twice(
    fast_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every transaction and every rename of a retirement is the last one of its process once."""
    path, out = fast_path / "journal.sqlite", fast_path / "episodes"
    monkeypatch.setattr(retention, "_CHUNK", 1)
    with Journal.open(path) as journal:
        await train(Ledger(journal), 1, 2, filtered=True)
        whole = {step: export_bytes(journal, step, fast_path / "whole") for step in (1, 2)}
        before = audit(path)
        left, transact, replace = place, Journal.transact, export.os.replace

        def spend() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Cut

        async def until_cut(self: Journal, *arguments: Any, **how: Any) -> Any:
            spend()
            return await transact(self, *arguments, **how)

        def rename_until_cut(source: Any, target: Any) -> None:
            spend()
            replace(source, target)

        monkeypatch.setattr(Journal, "transact", until_cut)
        monkeypatch.setattr(export.os, "replace", rename_until_cut)
        with pytest.raises((Cut, JournalError)):
            await retire(journal, oldest_checkpoint=2, keep_steps=0, export=out)
        monkeypatch.undo()
    kept = {file: file.stat().st_mtime_ns for file in out.glob("*.parquet")} if out.exists() else {}
    marked = 0
    with Journal.open(path) as journal:
        assert audit(path).breaches == ()
        assert audit(path).groups == before.groups
        assert audit(path).sampled_tokens == before.sampled_tokens
        marked = journal.submit(lambda c: retention.retired_step(c)).result(5)
        await retire(journal, oldest_checkpoint=2, keep_steps=0, export=out)
        assert (count(journal, "groups"), count(journal, "slots"), count(journal, "events")) == (0, 0, 1)
    after = audit(path)
    assert (after.breaches, after.groups, after.slots) == ((), before.groups, before.slots)
    assert after.sampled_tokens == before.sampled_tokens
    assert sorted(file.name for file in out.iterdir()) == [export.step_file(step) for step in (1, 2)]
    for step, content in whole.items():
        file = out / export.step_file(step)
        assert file.read_bytes() == content
        if step <= marked:
            assert file.stat().st_mtime_ns == kept[file]


def export_bytes(journal: Journal, step: int, directory: Path) -> bytes:
    export.export_step(lambda f: journal.submit(f).result(5), journal.blobs, step, directory)
    return (directory / export.step_file(step)).read_bytes()


async def test_a_step_that_began_to_leave_without_export_is_not_exported_in_part(
    journal: Journal, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(Ledger(journal), 1)
    await journal.transact(lambda c: retention._mark(c, 1))
    monkeypatch.setattr(retention, "_CHUNK", 1)
    await journal.transact(lambda c: retention._let_go(c, 1))
    await retire(journal, oldest_checkpoint=1, keep_steps=0, export=fast_path / "episodes")
    assert not (fast_path / "episodes").exists()
    assert count(journal, "groups") == 0


async def test_a_file_that_cannot_be_written_is_named_and_its_episodes_stay(journal: Journal, fast_path: Path) -> None:
    await train(Ledger(journal), 1)
    (fast_path / "episodes").write_text("in the way")
    with pytest.raises(JournalError, match=r"episodes/step-000001.parquet cannot be written"):
        await retire(journal, oldest_checkpoint=1, keep_steps=0, export=fast_path / "episodes")
    assert count(journal, "slots") == 2
    assert await retire(journal, oldest_checkpoint=1, keep_steps=0) == [1]


async def test_on_a_network_file_system_the_writer_reads_for_the_export(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "on_network", lambda path: True)
    with Journal.open(fast_path / "journal.sqlite") as journal:
        await train(Ledger(journal), 1)
        await retire(journal, oldest_checkpoint=1, keep_steps=0, export=fast_path / "episodes")
    assert len(rows(fast_path / "episodes" / "step-000001.parquet")) == 2


async def test_in_the_background_a_cut_leaves_the_rest_to_the_next_start(
    journal: Journal, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, out = Ledger(journal), fast_path / "episodes"
    await train(ledger, 1, 2, filtered=True)
    begun, go_on, records = asyncio.Event(), threading.Event(), export._records
    loop = asyncio.get_running_loop()

    def held(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(20)
        return records(*arguments)

    monkeypatch.setattr(export, "_records", held)
    background = Retention(journal, 0, out)
    await background.begin(2)
    await begun.wait()
    await background.stop()
    go_on.set()
    await until(lambda: not list(out.iterdir()))  # the thread that was left behind ends, and leaves no file
    monkeypatch.undo()
    assert audit(journal.path).breaches == ()
    await background.begin(2)
    await background.finish()
    assert [len(rows(out / export.step_file(step))) for step in (1, 2)] == [4, 4]
    assert count(journal, "slots") == 0


async def test_a_live_run_is_exported_as_it_stands(journal: Journal, fast_path: Path) -> None:
    ledger, out = Ledger(journal), fast_path / "out"
    await train(ledger, 1, 2)
    await retire(journal, oldest_checkpoint=1, keep_steps=0, export=fast_path / "episodes")
    await play(ledger, await create(ledger, new_group(2)), 0.0, 1.0)
    lease = await ledger.lease(3, 1, max_filtered=0)
    assert lease is not None
    await play(ledger, await create(ledger, new_group(3)), 0.0, 1.0)
    group = await create(ledger, new_group(4))
    begin(ledger, group.slots[0])
    assert export.export_run(journal.path, out) == {
        "step-000002.parquet": 2, "step-000003.parquet": 2, "unsettled.parquet": 2
    }  # fmt: skip
    found = [(row["step"], row["outcome"]) for file in sorted(out.iterdir()) for row in rows(file)]
    assert found == [(2, "consumed")] * 2 + [(3, "leased")] * 2 + [(None, "ready")] * 2
    shutil.rmtree(out)
    with pytest.raises(Exception, match="where the run itself writes"):
        export.export_run(journal.path, fast_path / "episodes")
    assert read_status(journal.path).groups["consumed"] == 2


def test_an_ended_event_alone_is_a_row_too(journal: Journal, fast_path: Path) -> None:
    """An environment that could not even be made leaves an episode without tokens."""
    ledger = Ledger(journal)
    group = asyncio.run(create(ledger, new_group(0)))
    begin(ledger, group.slots[0])
    end(ledger, group.slots[0], None, "EnvError: no")
    assert export.export_run(journal.path, fast_path / "out") == {"unsettled.parquet": 1}
    (row,) = rows(fast_path / "out" / "unsettled.parquet")
    assert (row["token_ids"], row["outcome"], row["stop_reason"]) == ([], "failed", "EnvError: no")
