"""Files named by the hash of their content: written whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from gspo_agent.errors import JournalError


class BlobStore:
    """A directory of files `ab/abcd...`, each named by the SHA-256 of its content."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        return self.root / digest[:2] / digest

    def put(self, digest: str, data: bytes) -> None:
        """Returns when the file, and its name, would survive a power cut."""
        path = self.path(digest)
        if path.exists():
            return
        self.root.mkdir(exist_ok=True)  # but not the run's directory, where that has been moved away
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{digest}.tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def get(self, digest: str) -> bytes:
        """Raises JournalError where the file is missing or its content is not what its name says."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise JournalError(f"{path} is missing; the journal refers to it") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise JournalError(f"{path} is damaged: its content does not match its name")
        return data

    def prune(self, needed: Iterable[str]) -> int:
        """Deletes every file that is not `needed`; returns how many went."""
        keep, gone = set(needed), 0
        for path in self.root.glob("??/*"):
            if path.name not in keep:
                path.unlink(missing_ok=True)
                gone += 1
        return gone
