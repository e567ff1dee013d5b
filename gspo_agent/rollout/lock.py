"""One process per run: a lock that dies with its process, and a lease that other hosts can read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sqlite3
import time
from pathlib import Path

from gspo_agent.errors import JournalError, RunLocked, written

HEARTBEAT = 5.0
"""Seconds between signs of life."""
EXPIRY = 30.0
"""Seconds without one after which another host may take the run."""

# POSIX locks belong to the process: a second open in the same process would succeed, and its close would drop both.
held: set[Path] = set()
"""The locks of this process."""


def path_of(journal: Path) -> Path:
    # Never the journal itself: closing any descriptor of it would drop SQLite's own locks.
    return journal.with_name(journal.name + ".lock").resolve()


class RunLock:
    """A POSIX lock on a file beside the journal. Raises RunLocked where another process, or this one, holds it."""

    def __init__(self, journal: Path) -> None:
        self._path = path_of(journal)
        if self._path in held:
            raise RunLocked(f"{journal} is already open in this process")
        with written(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._file, 200).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            raise RunLocked(f"{journal} belongs to a running process ({owner}); stop it first") from None
        with contextlib.suppress(OSError):  # a full disk: who has the lock is only for a message
            os.ftruncate(self._file, 0)
            os.write(self._file, f"pid {os.getpid()} on {socket.gethostname()}".encode())
        held.add(self._path)

    def release(self) -> None:
        if self._path in held:
            held.discard(self._path)
            os.close(self._file)


def begin_life(connection: sqlite3.Connection, journal: Path) -> int:
    """Takes the lease and starts the next life, in the caller's transaction; returns its number.

    File locks do not reach other hosts on every file system; the lease does. Raises RunLocked while another host
    shows signs of life.
    """
    host, now = socket.gethostname(), time.time()
    row = connection.execute("SELECT host, pid, heartbeat FROM lease").fetchone()
    if row is not None and row[0] != host and now - row[2] < EXPIRY:
        raise RunLocked(
            f"{journal} belongs to pid {row[1]} on {row[0]}, seen {now - row[2]:.0f} s ago; stop it there, or wait "
            f"until {EXPIRY:.0f} s have passed"
        )
    life = connection.execute("SELECT coalesce(max(life), 0) + 1 FROM lives").fetchone()[0]
    first_event = "(SELECT coalesce(max(id), 0) + 1 FROM events)"
    connection.execute(f"INSERT INTO lives VALUES (?, ?, ?, ?, NULL, {first_event})", (life, host, os.getpid(), now))
    connection.execute("DELETE FROM lease")
    connection.execute("INSERT INTO lease VALUES (?, ?, ?, ?)", (life, host, os.getpid(), now))
    return int(life)


def check_lease(connection: sqlite3.Connection, life: int, journal: Path) -> None:
    """Inside a transaction: another host that took over meanwhile is never written over."""
    if connection.execute("SELECT life FROM lease").fetchone() != (life,):
        row = connection.execute("SELECT host FROM lease").fetchone()
        raise JournalError(f"{journal}: {row[0] if row else 'another process'} has taken this run over; this one stops")


def beat(connection: sqlite3.Connection, life: int) -> None:
    connection.execute("UPDATE lease SET heartbeat = ? WHERE life = ?", (time.time(), life))


def end_life(connection: sqlite3.Connection, life: int) -> None:
    connection.execute("UPDATE lives SET ended = ? WHERE life = ?", (time.time(), life))
    connection.execute("DELETE FROM lease WHERE life = ?", (life,))
