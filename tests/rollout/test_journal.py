"""The journal: what was awaited is there, one process has it, and damage is named."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.errors import JournalError, RunLocked
from gspo_agent.rollout import lock, schema
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.events import (
    Begun,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Observed,
    Row,
    Sampled,
    decode,
)
from gspo_agent.rollout.journal import Journal, read_events
from gspo_agent.rollout.ledger import Ledger, read_status
from gspo_agent.rollout.state import SAME, State
from gspo_agent.trajectory import Segment, Status
from tests.rollout.scene import nearly_fill

text = st.text(st.characters(codec="utf-8"), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@st.composite
def segments(draw: Any) -> Segment:
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
    logprobs = draw(st.lists(st.floats(-100, 0, width=32), min_size=len(token_ids), max_size=len(token_ids)))
    extras = {"experts": np.arange(len(token_ids) * 3).reshape(-1, 3)} if draw(st.booleans()) else {}
    return Segment(token_ids, "policy", logprobs, draw(st.integers(0, 10**9)), 1, extras)


messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": text}), max_size=3)
states = st.sampled_from([None, SAME, State.of({"a": [1]}), State.of(b"\x00\xff"), State.of("x" * 100_000)])
events = st.one_of(
    st.builds(Begun, st.integers(0, 2**31), text, st.integers(0, 9), st.integers(1, 9)),
    st.builds(
        Observed, st.integers(0, 99), messages, st.none() | ids, floats, st.booleans(), st.booleans(),
        st.dictionaries(text, floats, max_size=2), st.dictionaries(text, floats, max_size=2),
        st.none() | st.just([{"type": "function"}]), states, floats,
    ),
    st.builds(
        Sampled, st.just(1), st.integers(0, 10**6), st.lists(segments(), min_size=1, max_size=3), text,
        st.sampled_from([None, "stop", "turn_tokens"]), st.just(0.25),
        st.none() | st.fixed_dictionaries({"role": st.just("assistant"), "content": text}),
    ),
    st.builds(CallBegun, text, text, st.dictionaries(text, st.integers(0, 9), max_size=2)),
    st.builds(CallEnded, text, st.dictionaries(text, text, max_size=2), states),
    st.builds(Ended, st.sampled_from(list(Status)), text, st.none() | floats),
)  # fmt: skip


def plain(value: Any) -> Any:
    """An event as something that compares by content."""
    if isinstance(value, Segment):
        extras = {name: rows.tolist() for name, rows in value.extras.items()}
        logprobs = None if value.logprobs is None else value.logprobs.tolist()
        return value.token_ids.tolist(), value.author, logprobs, value.weight_version, value.turn, extras
    if isinstance(value, State):
        return value.form, value.value
    if isinstance(value, list | tuple | array):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


@settings(max_examples=200, deadline=None)
@given(events)
def test_an_event_is_read_back_as_it_was_written(event: Event) -> None:
    row, blobs = event.encode()
    assert plain(decode(Row(*row), lambda digest: blobs[digest])) == plain(event)


async def test_what_was_awaited_survives_a_kill(tmp_path: Path) -> None:
    """A copy of the files, made while the writer is alive, is what a kill leaves."""
    path = tmp_path / "a" / "journal.sqlite"
    with Journal.open(path) as journal:
        for number in range(20):
            journal.append(1, CallBegun(f"behind {number}", "f", {}))
        await journal.durable(1, CallBegun("awaited", "f", {}))
        shutil.copytree(path.parent, tmp_path / "b")
    with Journal.open(tmp_path / "b" / "journal.sqlite") as journal:
        assert journal.life == 2
        found = journal.submit(lambda c: read_events(c, 1, journal.blobs)).result()
    assert [event.call_id for event in found] == [*(f"behind {n}" for n in range(20)), "awaited"]  # type: ignore[attr-defined]


def test_write_behind_reaches_the_disk_by_itself(fast_path: Path) -> None:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        journal.append(1, CallBegun("a", "f", {}))
        with sqlite3.connect(journal.path) as beside:
            deadline = time.monotonic() + 10
            while not beside.execute("SELECT count(*) FROM events").fetchone()[0]:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        beside.close()


def test_events_of_one_append_are_one_transaction(fast_path: Path) -> None:
    """A function that raises undoes the events that came with it, and nothing else."""
    with Journal.open(fast_path / "journal.sqlite") as journal:
        journal.append(1, CallBegun("kept", "f", {}))

        def refuse(connection: sqlite3.Connection) -> None:
            raise JournalError("no")

        with pytest.raises(JournalError, match="no"):
            journal.submit(refuse, slot=1, events=[CallBegun("undone", "f", {})]).result(5)
        found = journal.submit(lambda c: read_events(c, 1, journal.blobs)).result(5)
    assert [event.call_id for event in found] == ["kept"]  # type: ignore[attr-defined]


async def test_a_row_that_no_table_can_hold_is_told_to_everybody_who_waits(fast_path: Path) -> None:
    """The writer does not die of it unheard."""
    journal = Journal.open(fast_path / "journal.sqlite")
    journal.append(2**70, CallBegun("a", "f", {}))
    async with asyncio.timeout(10):
        with pytest.raises(JournalError, match="cannot be written: OverflowError"):
            await journal.durable(1, CallBegun("b", "f", {}))
    with pytest.raises(JournalError, match="OverflowError"):
        journal.close()


def test_a_second_open_is_refused_in_this_process_and_in_another(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    code = (
        "import sys; from pathlib import Path; from gspo_agent.rollout.journal import Journal; "
        "Journal.open(Path(sys.argv[1])).close()"
    )
    with Journal.open(path):
        with pytest.raises(RunLocked, match="already open in this process"):
            Journal.open(path)
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert "RunLocked" in other.stderr
        assert f"pid {os.getpid()}" in other.stderr
    after = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert after.returncode == 0, after.stderr


def test_a_forked_survivor_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    code = (
        "import os, sys, time; from pathlib import Path; from gspo_agent.rollout.journal import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if not child: os.close(1); os.close(2); time.sleep(30); os._exit(0)\n"
        "print(child, flush=True); os.kill(os.getpid(), 9)"
    )
    victim = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    child = int(victim.stdout)
    try:
        os.kill(child, 0)
        with Journal.open(path) as journal:
            assert journal.life == 2
    finally:
        os.kill(child, 9)


def test_another_host_may_take_the_run_only_after_the_lease_expired(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal.open(path).close()

    def pretend(heartbeat: float) -> None:
        connection = sqlite3.connect(path)
        connection.execute("DELETE FROM lease")
        connection.execute("INSERT INTO lease VALUES (9, 'elsewhere', 42, ?)", (heartbeat,))
        connection.commit()
        connection.close()

    pretend(time.time() - 1)
    with pytest.raises(RunLocked, match="pid 42 on elsewhere"):
        Journal.open(path)
    pretend(time.time() - lock.EXPIRY - 1)
    with Journal.open(path) as journal:
        # And whoever was taken over writes nothing more.
        journal.submit(lambda c: c.execute("UPDATE lease SET life = 77, host = 'elsewhere'")).result(5)
        with pytest.raises(JournalError, match="elsewhere has taken this run over"):
            journal.flush()
        with pytest.raises(JournalError, match="taken this run over"):
            journal.append(1, CallBegun("a", "f", {}))
        with pytest.raises(JournalError):
            journal.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is long enough to be looked at" * 20, b"SQLite format 3\x00"]
)
def test_a_file_of_something_else_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal\.sqlite.*(not a database|malformed)"):
        Journal.open(path)
    with pytest.raises(JournalError):
        read_status(path)
    assert path.read_bytes() == content


def test_another_programs_database_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE events (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="of something else"):
        Journal.open(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema.FORMAT + 1}")
    connection.close()
    with pytest.raises(JournalError, match=f"format {schema.FORMAT + 1}"):
        Journal.open(path)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal.open(path) as journal:
        for number in range(500):
            journal.append(1, CallBegun(f"{number}" * 50, "f", {}))
    data = bytearray(path.read_bytes())
    data[-12288:] = os.urandom(12288)
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        Journal.open(path)


def test_a_damaged_row_is_named(fast_path: Path) -> None:
    with Journal.open(fast_path / "journal.sqlite") as journal:
        segment = Segment([1, 2], "policy", [-1.0, -2.0], 3)
        journal.append(5, Sampled(0, 0, [segment], "r", None))
        journal.submit(lambda c: c.execute("UPDATE events SET logprobs = x'00000000'")).result(5)
        with pytest.raises(JournalError, match=r"event 1 \(sampled\) of slot 5 is damaged"):
            journal.submit(lambda c: read_events(c, 5, journal.blobs)).result(5)
        journal.append(6, Observed(0, [], [1, 2, 3]))
        journal.submit(lambda c: c.execute("UPDATE events SET token_ids = x'01000000ff' WHERE slot = 6")).result(5)
        with pytest.raises(JournalError, match=r"event 2 \(observed\) of slot 6 is damaged"):
            journal.submit(lambda c: read_events(c, 6, journal.blobs)).result(5)


def test_a_text_that_is_none_any_more_is_damage(fast_path: Path) -> None:
    journal = Journal.open(fast_path / "journal.sqlite")
    journal.append(5, CallBegun("a", "f", {}))
    journal.submit(lambda c: c.execute("UPDATE events SET kind = CAST(x'ff' AS TEXT)")).result(5)
    with pytest.raises(JournalError, match=r"'kind'.* it is damaged; restore it from a copy"):
        journal.submit(lambda c: read_events(c, 5, journal.blobs)).result(5)
    with pytest.raises(JournalError):
        journal.close()


async def test_a_full_disk_surfaces_and_nothing_goes_on(fast_path: Path) -> None:
    path = fast_path / "journal.sqlite"
    with pytest.raises(JournalError, match="full; free some space"), Journal.open(path) as journal:  # noqa: PT012
        nearly_fill(journal, 4)
        for _ in range(1000):
            await journal.durable(1, CallBegun("x" * 3000, "f", {}))
    with Journal.open(fast_path / "journal.sqlite") as journal:
        kept = journal.submit(lambda c: read_events(c, 1, journal.blobs)).result(5)
        assert len(kept) >= 1


async def test_a_blob_that_cannot_be_written_surfaces(fast_path: Path) -> None:
    with pytest.raises(JournalError, match="blobs"), Journal.open(fast_path / "journal.sqlite") as journal:  # noqa: PT012
        (fast_path / "blobs").write_text("in the way")
        await journal.durable(1, CallEnded("a", {}, State.of("x" * 100_000)))


def test_a_large_state_is_a_file_named_by_its_content(fast_path: Path) -> None:
    state = State.of({"text": "y" * 70_000})
    with Journal.open(fast_path / "journal.sqlite") as journal:
        for slot in (1, 2):
            journal.append(slot, CallEnded("a", {}, state))
        journal.flush()
        files = [path for path in (fast_path / "blobs").rglob("*") if path.is_file()]
        assert len(files) == 1
        (event,) = journal.submit(lambda c: read_events(c, 2, journal.blobs)).result(5)
        assert isinstance(event, CallEnded)
        assert isinstance(event.state, State)
        assert event.state.value == {"text": "y" * 70_000}
        files[0].write_bytes(b"changed")
        with pytest.raises(JournalError, match="does not match its name"):
            _ = event.state.value
        files[0].unlink()
        with pytest.raises(JournalError, match="is missing"):
            _ = event.state.value


def test_a_kill_between_temporary_file_and_rename_leaves_no_blob(fast_path: Path, monkeypatch: Any) -> None:
    store = BlobStore(fast_path / "blobs")

    def die(source: Any, target: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        store.put("ab" * 32, b"data")
    monkeypatch.undo()
    assert not store.path("ab" * 32).exists()
    store.put("ab" * 32, b"data")
    assert store.path("ab" * 32).read_bytes() == b"data"
    assert store.prune(["ab" * 32]) == 0
    assert store.prune([]) == 1


def test_a_life_is_never_used_twice(tmp_path: Path) -> None:
    lives = []
    for _ in range(3):
        with Journal.open(tmp_path / "journal.sqlite") as journal:
            lives.append(journal.life)
    assert lives == [1, 2, 3]


def test_status_of_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is this a run directory"):
        read_status(tmp_path / "journal.sqlite")


def test_on_a_network_file_system_only_the_running_process_tells_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "on_network", lambda path: True)
    monkeypatch.setattr(schema, "READ_TIMEOUT", 0.1)
    path = tmp_path / "journal.sqlite"
    with Journal.open(path) as journal:
        journal.append(1, CallBegun("a", "f", {}))
        assert Ledger(journal).status().life == 1
        assert not Path(f"{path}-shm").exists()
        with pytest.raises(JournalError, match="another process has it open"):
            read_status(path)
    assert read_status(path).life == 1


def test_a_run_that_can_only_be_read_is_read_with_what_its_last_process_left_in_the_wal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "run" / "journal.sqlite", tmp_path / "copy"
    with Journal.open(path):
        shutil.copytree(path.parent, copy)  # as a kill would leave it
    path.with_name("journal.sqlite-shm").unlink(missing_ok=True)
    (copy / "journal.sqlite-shm").unlink()
    assert (copy / "journal.sqlite-wal").stat().st_size
    # Tests may run as root, whom no permission stops; a read-only mount would.
    monkeypatch.setattr(schema.os, "access", lambda *_: False)
    for run in (path.parent, copy):
        before = sorted(file.name for file in run.iterdir())
        assert read_status(run / "journal.sqlite").life == 1
        assert sorted(file.name for file in run.iterdir()) == before
    (copy / "journal.sqlite-wal").unlink()
    (copy / "journal.sqlite").write_bytes(b"no journal at all" * 100)
    with pytest.raises(JournalError, match="not a journal or it is damaged"):
        read_status(copy / "journal.sqlite")


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite.lock").mkdir()
    with pytest.raises(JournalError, match=r"journal.sqlite.lock cannot be written: Is a directory; see free space"):
        Journal.open(tmp_path / "journal.sqlite")


def test_jobs_gather_only_as_long_as_more_of_them_come(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept, sleep = [], time.sleep
    more: list[Callable[[], None]] = []

    def slumber(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)
        for put in more:
            put()

    with Journal.open(fast_path / "journal.sqlite") as journal:
        journal.submit(lambda connection: sleep(0.02)).result()
        monkeypatch.setattr(time, "sleep", slumber)
        journal.submit(lambda connection: sleep(0.02)).result()
        alone = sum(slept)
        slept.clear()
        more.append(lambda: journal.append(1, CallBegun("1", "add", {})))
        journal.submit(lambda connection: more.clear()).result()
        monkeypatch.undo()
    assert alone == pytest.approx(0.01)
    assert sum(slept) > 2 * alone
