"""Whatever lies in the place of a journal is taken up, repaired or named; nothing of it is lost in silence."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_agent.errors import JournalError
from gspo_agent.rollout import schema
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.events import CallBegun
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger, read_status
from tests.rollout.moves import create, new_group, play, train

WAL = "journal.sqlite-wal"
NOISE = random.Random(0).randbytes(32768)


async def killed(root: Path, name: str, steps: int = 3) -> Path:
    """The journal of a run that was killed: what was committed lies in its write-ahead log."""
    with Journal.open(root / f"{name}-alive" / "journal.sqlite") as journal:
        ledger = Ledger(journal)
        await train(ledger, *range(1, steps + 1))
        for n in range(steps, steps + 3):
            await play(ledger, await create(ledger, new_group(n)), 0.0, 1.0)
        journal.flush()
        shutil.copytree(journal.path.parent, root / name)
    return root / name / "journal.sqlite"


@pytest.mark.parametrize("seed", range(12))
async def test_a_torn_log_is_read_up_to_its_last_whole_transaction_and_the_rest_is_named(
    fast_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    path = await killed(fast_path, "run")
    wal = path.with_name(WAL)
    content = bytearray(wal.read_bytes())
    frames = schema.remains.commits(path)
    cut = draw.randrange(32 + 4120 * frames[0], len(content))
    kind = draw.choice(["truncated", "zeros", "a flipped bit", "noise"])
    if kind == "truncated":
        del content[cut:]
    elif kind == "zeros":
        content[cut:] = bytes(len(content) - cut)
    elif kind == "noise":
        content[cut : cut + 512] = draw.randbytes(512)
        del content[cut + 512 + 4096 :]
    else:
        content[cut] ^= 1 << draw.randrange(8)
    wal.write_bytes(content)
    readable = (cut - 32) // 4120  # frames before the damage
    left = schema.remains.commits(path)
    assert frames[0] <= readable
    with caplog.at_level(logging.WARNING), Journal.open(path) as journal:
        ledger = Ledger(journal)
        number = ledger.cursors().get(0, 0)
        await play(ledger, await create(ledger, new_group(number)), 0.0, 1.0)
    named = [record.getMessage() for record in caplog.records]
    lost = [frame for frame in left if frame > readable]
    assert bool(named) == bool(lost), (kind, named)
    assert all(f"the last {len(lost)} transactions cannot be read" in text for text in named)
    assert audit(path).breaches == ()


async def test_a_log_of_which_nothing_can_be_read_begins_no_new_run(fast_path: Path) -> None:
    path = await killed(fast_path, "run")
    content = bytearray(path.with_name(WAL).read_bytes())
    content[1000] ^= 1
    path.with_name(WAL).write_bytes(content)
    with pytest.raises(JournalError, match=r"none of its \d+ transactions can be read"):
        Journal.open(path)
    with pytest.raises(JournalError, match=r"none of its \d+ transactions can be read"):
        Journal.open(path)


async def test_a_whole_log_is_nothing_to_remark_upon(fast_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is one that began anew over an older, longer one."""
    path = await killed(fast_path, "run", steps=8)
    with Journal.open(path) as journal:
        journal.submit(lambda c: None).result(5)
        await train(Ledger(journal), 9)
        shutil.copytree(path.parent, fast_path / "again")
    with Journal.open(fast_path / "again" / "journal.sqlite") as journal:
        assert Ledger(journal).last_step().step == 9  # type: ignore[union-attr]
    assert not caplog.records
    assert audit(fast_path / "again" / "journal.sqlite").breaches == ()


@pytest.mark.parametrize("spoil", [lambda p: p.unlink(), lambda p: p.write_bytes(b"")])
async def test_a_log_without_its_main_file_is_named_and_kept(fast_path: Path, spoil: Callable[[Path], None]) -> None:
    path = await killed(fast_path, "run")
    wal = path.with_name(WAL)
    content = wal.read_bytes()
    spoil(path)
    with pytest.raises(JournalError, match=rf"(empty|missing), but {WAL} beside it has {len(content)} bytes"):
        Journal.open(path)
    with pytest.raises(JournalError, match=r"copy journal\.sqlite here too"):
        read_status(path)
    assert wal.read_bytes() == content


async def test_the_log_of_another_run_is_named_and_neither_file_is_touched(fast_path: Path) -> None:
    path, other = await killed(fast_path, "run"), await killed(fast_path, "other", steps=5)
    Journal.open(path).close()  # its log is in its main file now
    shutil.copy(other.with_name(WAL), path.with_name(WAL))
    before = path.read_bytes(), path.with_name(WAL).read_bytes()
    with pytest.raises(JournalError, match=r"journal.sqlite-wal is not of journal.sqlite: .* from one copy"):
        Journal.open(path)
    assert (path.read_bytes(), path.with_name(WAL).read_bytes()) == before
    path.with_name(WAL).unlink()
    with Journal.open(path) as journal:
        assert Ledger(journal).last_step().step == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [b"", b"\x00" * 32768, NOISE, NOISE[:100]])
async def test_a_leftover_index_of_the_log_is_made_anew(fast_path: Path, content: bytes) -> None:
    path = await killed(fast_path, "run")
    path.with_name("journal.sqlite-shm").write_bytes(content)
    with Journal.open(path) as journal:
        assert Ledger(journal).last_step().step == 3  # type: ignore[union-attr]
    assert audit(path).breaches == ()


@pytest.mark.parametrize("content", [b"", b"no log at all" * 1000, b"\x37\x7f\x06\x82", NOISE[:5000]])
async def test_what_is_no_log_is_left_out(fast_path: Path, content: bytes) -> None:
    path = await killed(fast_path, "run")
    Journal.open(path).close()
    path.with_name(WAL).write_bytes(content)
    with Journal.open(path) as journal:
        assert Ledger(journal).last_step().step == 3  # type: ignore[union-attr]


async def test_a_main_file_that_was_cut_short_is_named(fast_path: Path) -> None:
    path = await killed(fast_path, "run")
    Journal.open(path).close()
    content = path.read_bytes()
    for length in (len(content) - 4096, len(content) // 2, 4096, 5000, 50):
        path.write_bytes(content[:length])
        with pytest.raises(JournalError, match=r"journal\.sqlite"):
            Journal.open(path)


async def test_a_large_file_is_not_read_through_at_every_start_but_its_ledger_is(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fast_path / "journal.sqlite"
    with Journal.open(path) as journal:
        await train(Ledger(journal), 1)
        for number in range(400):
            journal.append(1, CallBegun(f"{number}" * 50, "f", {}))
    monkeypatch.setattr(schema, "CHECKED_WHOLE", 0)
    whole = path.read_bytes()

    def root(table: str) -> int:
        connection = sqlite3.connect(path)
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        connection.close()
        return int(page) - 1

    def spoil(page: int) -> None:
        path.write_bytes(whole[: page * 4096 + 8] + NOISE[:592] + whole[page * 4096 + 600 :])

    for table in ("slots", "steps"):
        spoil(root(table))
        with pytest.raises(JournalError, match=r"journal\.sqlite.*(damaged|malformed)"):
            Journal.open(path)
        path.write_bytes(whole)
    # An old event that nobody needs again does not stop the run; the audit names it.
    spoil(whole.index(b"200" * 50) // 4096)
    Journal.open(path).close()
    with pytest.raises(JournalError, match=r"journal\.sqlite.*(damaged|malformed)"):
        audit(path)


@pytest.mark.parametrize("version", [schema.FORMAT - 1, schema.FORMAT + 1])
def test_another_format_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "journal.sqlite"
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match=f"format {version}, this version reads {schema.FORMAT}"):
        Journal.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("lost", ["journal.sqlite", WAL, "the directory"])
@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
async def test_a_journal_that_is_taken_away_while_it_is_written_ends_the_run_and_not_its_content(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, how: str
) -> None:
    """SQLite writes on into what has no name any more; hours of a run would go with it."""
    path = fast_path / "run" / "journal.sqlite"
    file = path.parent if lost == "the directory" else path.with_name(lost)
    with Journal.open(path) as journal:
        monkeypatch.setattr(journal, "_last_beat", float("inf"))
        ledger = Ledger(journal)
        await train(ledger, 1)
        aside = file.with_name("aside")
        file.rename(aside)
        if how == "replaced":
            (shutil.copytree if aside.is_dir() else shutil.copy)(aside, file)
        elif how == "deleted":
            shutil.copytree(aside, fast_path / "kept") if aside.is_dir() else None
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
        await train(ledger, 2)  # between two signs of life it is not looked at
        monkeypatch.setattr(journal, "_last_beat", float("-inf"))
        what = "replaced" if how == "replaced" else "deleted or moved away"
        with pytest.raises(JournalError, match=rf"{lost if file.suffix else 'journal.sqlite'} was {what} while"):
            await train(ledger, 3)
        with pytest.raises(JournalError, match="was"):
            journal.close()
    if how == "moved" and aside.is_dir():
        assert read_status(aside / path.name).step == 2
        assert not path.parent.exists()


async def test_a_directory_that_was_moved_away_is_not_made_anew_for_a_blob(fast_path: Path) -> None:
    store = BlobStore(fast_path / "run" / "blobs")
    (fast_path / "run").mkdir()
    store.put("ab12", b"x")
    (fast_path / "run").rename(fast_path / "moved")
    with pytest.raises(FileNotFoundError):
        store.put("ab34", b"y")
    assert not (fast_path / "run").exists()
