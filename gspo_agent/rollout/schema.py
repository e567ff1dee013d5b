"""The tables of a run's one file, and how a connection to it is opened."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote

from gspo_agent import mounts
from gspo_agent.errors import JournalError, NotBegun, written
from gspo_agent.rollout import remains

_log = logging.getLogger(__name__)
APPLICATION_ID = 0x4753504F  # "GSPO"
FORMAT = 2
CHECKED_WHOLE = 64 * 1024 * 1024
"""Bytes up to which a file is looked through at every start; on a slow disk that takes about a second."""
_WAL_PAGES = 4096
"""Pages of 4 KiB after which SQLite moves what is in the WAL to the file: a page that many transactions change, as the
last one of the log and those of the indices are, is moved once and not every time. More would make opening slower."""
READ_TIMEOUT = 5.0  # seconds that a reader waits for the writer, unless told otherwise

TABLES = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lives (
    life INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, began REAL NOT NULL, ended REAL,
    first_event INTEGER NOT NULL
);
CREATE TABLE lease (life INTEGER NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL, heartbeat REAL NOT NULL);

-- The log. Rows are only ever added, and leave it when what they led to is long settled; `id` is their order in the
-- whole run and is never used again.
CREATE TABLE events (
    id INTEGER PRIMARY KEY, slot INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL,
    token_ids BLOB, logprobs BLOB, state BLOB, blob TEXT
);
CREATE INDEX events_of_slot ON events (slot);
CREATE INDEX events_with_blob ON events (blob) WHERE blob IS NOT NULL;

-- The ledger, changed in the same transaction as the event that changes it.
CREATE TABLE cursors (source INTEGER PRIMARY KEY, cursor INTEGER NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT, source INTEGER NOT NULL, cursor INTEGER NOT NULL, spec TEXT NOT NULL,
    task BLOB NOT NULL,
    size INTEGER NOT NULL, max_attempts INTEGER NOT NULL, min_group INTEGER NOT NULL, seed INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'leased', 'consumed', 'filtered', 'given_up')),
    flat INTEGER, ready INTEGER UNIQUE, settled INTEGER
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_settled ON groups (settled) WHERE settled IS NOT NULL;
-- `versions` is {"STEP": sampled tokens} by the step of the weights, written when the slot ends.
CREATE TABLE slots (
    id INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER NOT NULL, number INTEGER NOT NULL, attempt INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed', 'restarted', 'expired')),
    reward REAL, stop_reason TEXT, ended REAL, versions TEXT, UNIQUE (group_id, number, attempt)
);
CREATE INDEX slots_by_state ON slots (state);
CREATE TABLE leases (
    step INTEGER NOT NULL, position INTEGER NOT NULL, group_id INTEGER NOT NULL UNIQUE, filtered INTEGER NOT NULL,
    max_weight_lag INTEGER, PRIMARY KEY (step, position)
) WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, life INTEGER NOT NULL, at REAL NOT NULL, checkpoint TEXT, digest TEXT,
    metrics BLOB NOT NULL
);
CREATE TABLE rollbacks (life INTEGER NOT NULL, at REAL NOT NULL, newest INTEGER NOT NULL, step INTEGER NOT NULL);

-- What is left of groups that have gone: which tasks they had (`first` to `last`), and what they add to every count.
CREATE TABLE retired (
    source INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (source, first)
) WITHOUT ROWID;
CREATE TABLE tallies (
    kind TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
"""


def connect(path: Path, *, durability: str) -> sqlite3.Connection:
    """A connection that may write; creates the tables in a new file.

    Raises JournalError where the file is not a journal, is of another format, lies there without its other half or
    with another run's, or is damaged. What a power cut tore off the end of the log is left out, and said.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remains.refuse_half(path)
    if not on_network(path):
        remains.refuse_strange_wal(path)
    committed = remains.commits(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        if on_network(path):
            # Shared memory does not cross hosts; with an exclusive lock SQLite keeps the WAL index in this process.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _check_identity(connection, path)
        _name_torn(connection, path, committed)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        _create_or_verify(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise damaged(path, error) from error
    except JournalError:
        connection.close()
        raise
    return connection


def _check_identity(connection: sqlite3.Connection, path: Path) -> None:
    """Before anything is written: a file of somebody else stays as it is."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application == 0 and tables == 0:
        return
    if application != APPLICATION_ID:
        raise JournalError(f"{path} is an SQLite file of something else, not a journal; choose another run directory")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT:
        raise JournalError(
            f"{path} has journal format {version}, this version reads {FORMAT}; use the version it is of"
        )


def _create_or_verify(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        # One transaction with the identity last: a kill leaves an empty file or a whole one.
        connection.executescript(
            f"BEGIN IMMEDIATE;{TABLES}PRAGMA application_id = {APPLICATION_ID};PRAGMA user_version = {FORMAT};COMMIT;"
        )
        return
    check_whole(connection, path, but_log=path.stat().st_size > CHECKED_WHOLE)


def _name_torn(connection: sqlite3.Connection, path: Path, committed: list[int]) -> None:
    """Before anything is written: what `committed` says was there, and is not read, is gone from here on."""
    _, readable, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    lost = sum(frame > readable for frame in committed)
    if lost and readable >= 0:
        _log.warning(
            "%s: the last %d transactions cannot be read, torn by a power cut or damaged; the run goes on from what "
            "was before them. run.durability = 'power' waits for the disk",
            remains.wal_of(path), lost,
        )  # fmt: skip


def check_whole(connection: sqlite3.Connection, path: Path, *, but_log: bool = False) -> None:
    """Looks through every page, or through the ledger's alone; raises JournalError at the first that is damaged.

    The ledger's are few, however long the run. The log's are read from the disk at every start for nothing but this;
    a damaged one is named when it is needed.
    """
    checks = ["PRAGMA quick_check(1)"]
    if but_log:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'events'")
        checks = [f"PRAGMA quick_check({name})" for (name,) in tables]
    for check in checks:
        verdict = connection.execute(check).fetchone()[0]
        if verdict != "ok":
            raise JournalError(
                f"{path} is damaged: {verdict}; restore it, and {path.name}-wal if there is one, from one copy, or "
                "choose another run directory"
            )


def read_only(path: Path, timeout: float | None = None) -> sqlite3.Connection:
    """A connection for looking, beside a process that writes. Raises JournalError where there is nothing to see, and
    where that process has the file for itself, as on a network file system, for longer than `timeout` seconds."""
    remains.refuse_half(path)
    if not path.exists():
        raise JournalError(f"no journal at {path}; is this a run directory?")
    connection = _open_to_read(path, READ_TIMEOUT if timeout is None else timeout)
    try:
        _check_identity(connection, path)
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            raise NotBegun(f"{path} is empty; the run has not begun")
    except sqlite3.Error as error:
        connection.close()
        raise damaged(path, error) from error
    except JournalError:
        connection.close()
        raise
    return connection


def _open_to_read(path: Path, timeout: float) -> sqlite3.Connection:
    def opened(name: Path, query: str) -> sqlite3.Connection:
        uri = f"file:{quote(str(name.resolve()))}?{query}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout)

    if os.access(path.parent, os.W_OK):
        return opened(path, "mode=ro")
    # Where no shared memory can be made, SQLite reads only what it may take to be unchanging, and without the WAL.
    wal = path.with_name(path.name + "-wal")
    if not wal.exists() or not wal.stat().st_size:
        return opened(path, "mode=ro&immutable=1")
    with written(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as copies:
        for file in (path, wal):
            shutil.copy(file, copies)
        connection = opened(Path(copies) / path.name, "mode=rw")
        with contextlib.suppress(sqlite3.Error):  # what is no journal is told by the caller
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection  # what is open outlives its name


def damaged(path: Path, error: Exception) -> JournalError:
    """What SQLite says, with the file and the remedy."""
    text = str(error)
    if "full" in text:
        remedy = "free some space and run the same command again; nothing that was committed is lost"
    elif "not a database" in text or "malformed" in text or "UTF-8" in text:
        remedy = "it is not a journal or it is damaged; restore it from a copy or choose another run directory"
    elif "locked" in text:
        remedy = "another process has it open"
    else:
        remedy = "see the directory's permissions and free space, and run the same command again"
    return JournalError(f"{path}: {text}; {remedy}")


def on_network(path: Path) -> bool:
    """Whether the file lies on a file system that several hosts may mount; False where that cannot be told."""
    return mounts.on_network(path.parent)
