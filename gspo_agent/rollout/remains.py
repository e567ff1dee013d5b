"""What a dead process, a power cut or a copy left beside the journal: told before SQLite acts on it.

SQLite takes whatever lies beside a file for its own: it deletes the write-ahead log of a main file that is missing or
empty, and plays another run's into this one. A log whose end is torn it reads up to the last whole transaction, which
is right, and says nothing, which is not.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

from gspo_agent.errors import JournalError

_HEADER, _FRAME_HEADER = 32, 24  # bytes; https://www.sqlite.org/fileformat2.html#the_write_ahead_log


def wal_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


class Place:
    """Where a journal and its log lie while they are written. What is deleted or moved away can be written to all the
    same, and SQLite does: an hour later it would be gone with everything that came since.

    Args:
        by_name: Compare no more than the names, for file systems that give a file another number now and then.
    """

    def __init__(self, path: Path, *, by_name: bool) -> None:
        self._by_name = by_name
        self._files = {file: self._number(file) for file in (path, wal_of(path)) if file.exists()}

    def check(self) -> None:
        """Raises JournalError where one of them is not there any more."""
        for file, number in self._files.items():
            try:
                there = self._number(file)
            except (FileNotFoundError, NotADirectoryError):
                there = None
            except OSError:  # says nothing about the file
                continue
            if there != number:
                raise JournalError(
                    f"{file} was {'deleted or moved away' if there is None else 'replaced'} while this process wrote "
                    "it; put it back if you can, and run the same command again, or `gspo-agent resume` where it lies "
                    "now: what was written before is whole"
                )

    def _number(self, file: Path) -> tuple[int, int]:
        found = file.stat()
        return (0, 0) if self._by_name else (found.st_dev, found.st_ino)


def refuse_half(path: Path) -> None:
    """Raises JournalError where there is a log and no main file: opening it would delete the log."""
    wal = wal_of(path)
    whole = path.exists() and path.stat().st_size
    if not whole and wal.exists() and wal.stat().st_size:
        raise JournalError(
            f"{path} is {'empty' if path.exists() else 'missing'}, but {wal.name} beside it has "
            f"{wal.stat().st_size} bytes of it; copy {path.name} here too, or delete {wal.name} to begin anew"
        )


def refuse_strange_wal(path: Path) -> None:
    """Raises JournalError where the log belongs to another run, as after restoring one file of two from a copy, and
    where it is all that there is and its beginning is damaged."""
    wal = wal_of(path)
    if not path.exists() or not wal.exists() or not wal.stat().st_size:
        return
    own, with_wal = _run_id(path, "mode=ro&immutable=1"), _run_id(path, "mode=ro")
    if own is not None and own != with_wal:
        raise JournalError(
            f"{wal} is not of {path.name}: that is run {own}, with the log it would be "
            f"{f'run {with_wal}' if with_wal else 'unreadable'}; restore both from one copy, or move {wal.name} away"
        )
    if own is None and with_wal is None and (lost := len(commits(path))) > 1:
        raise JournalError(
            f"{wal} is damaged where it begins: none of its {lost} transactions can be read; restore it and its "
            "main file from one copy, or choose another run directory"
        )


def _run_id(path: Path, how: str) -> str | None:
    """None where there is none to read; a reader changes neither file."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?{how}", uri=True)) as connection:
            row = connection.execute("SELECT value FROM run WHERE key = 'id'").fetchone()
            return None if row is None else str(row[0])
    except sqlite3.Error:
        return None


def commits(path: Path) -> list[int]:
    """The frames (from 1) that end a transaction, of the log as it lies there, readable or not."""
    wal = wal_of(path)
    try:
        header = np.fromfile(wal, ">u4", _HEADER // 4)
    except OSError:
        return []
    if len(header) < _HEADER // 4 or header[0] not in (0x377F0682, 0x377F0683):
        return []
    size = _FRAME_HEADER + int(header[2])
    number = (wal.stat().st_size - _HEADER) // size
    if number <= 0:
        return []
    frame = np.dtype({"names": ["ends", "salt"], "formats": [">u4", (">u4", 2)], "offsets": [4, 8], "itemsize": size})
    frames = np.memmap(wal, frame, mode="r", offset=_HEADER, shape=(number,))
    # Frames from before the log last began anew have another salt.
    ours = (frames["salt"] == header[4:6]).all(axis=1)
    return [int(n) + 1 for n in np.flatnonzero(ours & (frames["ends"] != 0))]
