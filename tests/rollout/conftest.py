from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory where there is one: a hundred journals need not wait for a disk."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=root, prefix="gspo-") as directory:
        yield Path(directory)
