"""A learner whose weights are what it was trained on: its checkpoint says by itself which lineage it belongs to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import ClassVar

import torch

from gspo_agent.engine.base import Weights
from gspo_agent.errors import JournalError, boundary
from gspo_agent.learner.batch import Batch
from gspo_agent.learner.checkpoint import Saved
from tests.faults.outside import Outside


class Lineage:
    """Stands where `Learner` does. `trained` is [[step, [group id, ...]], ...]."""

    seconds: ClassVar[float] = 0.0
    """How long a step takes."""
    groups: ClassVar[list[int]] = []
    """Of the batch that comes next."""

    def __init__(self, outside: Outside) -> None:
        self.trained: list[tuple[int, list[int]]] = []
        self.model = None
        self._outside = outside
        outside.write("learner", "begun", 0)

    def step(self, batch: Batch) -> dict[str, float]:
        self._outside.write("learner", "trained", batch.step, ",".join(map(str, self.groups)))
        time.sleep(self.seconds)
        self.trained.append((batch.step, list(self.groups)))
        return dict(batch.metrics)

    def weights(self, version: int, path: Path | None = None) -> Weights:
        content = torch.frombuffer(bytearray(json.dumps(self.trained).encode()), dtype=torch.uint8)
        return Weights(version, path, lambda: [("lineage", content)])

    def save(self, root: Path, step: int) -> Saved:
        return save(self, root, step)

    def restore(self, path: Path, digest: str | None = None) -> int:
        return restore(self, path, digest)

    def close(self) -> None:
        return None


def save(learner: Lineage, root: Path, step: int) -> Saved:
    """As `gspo_agent.learner.checkpoint.save`: another name, synced, renamed."""
    name = f"step-{step}"
    final, temporary = root / name, root / f".unfinished-{name}"
    with boundary(JournalError, f"checkpoint {final} cannot be written"):
        for old in (temporary, final):
            shutil.rmtree(old, ignore_errors=True)
        write(learner, temporary)
        temporary.rename(final)
        directory = os.open(root, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return Saved(name, final, digest(final))


def write(learner: Lineage, folder: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / "lineage.json").open("w") as file:
        json.dump(learner.trained, file)
        file.flush()
        os.fsync(file.fileno())


def restore(learner: Lineage, path: Path, expected: str | None = None) -> int:
    try:
        if expected is not None and digest(path) != expected:
            raise JournalError(f"checkpoint {path} is not what was saved")
        learner.trained = [(step, groups) for step, groups in json.loads((path / "lineage.json").read_text())]
    except (OSError, ValueError) as error:
        raise JournalError(f"checkpoint {path} cannot be read: {error}") from None
    step = learner.trained[-1][0]
    learner._outside.write("learner", "begun", step)
    return step


def digest(path: Path) -> str:
    file = path / "lineage.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
