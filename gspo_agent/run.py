"""Run: the directory that a training run lives in, from the outside.

config.json      the configuration of the last start
model/           the model it began with, where the run made it itself
journal.sqlite   every episode, group and step (see `rollout.journal`)
checkpoints/     step-N directories, each loadable by transformers
held_out.jsonl   one line per evaluation
curve.png        the learning curve, drawn after every step
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_agent.config import Config
from gspo_agent.errors import ConfigError, JournalError
from gspo_agent.monitor.curve import Point, band_title, draw
from gspo_agent.rollout.ledger import RunStatus, read_last_step, read_status, read_steps


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory. Reading needs no lock, so a live run can be looked at from another process.

    >>> Run.open("runs/math").status()
    """

    dir: Path

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """An existing run; ConfigError where there is none."""
        run = cls(Path(directory))
        if not run.config_file.exists():
            raise ConfigError(f"{str(directory)!r} is not a run directory: it has no {run.config_file.name}")
        return run

    @classmethod
    def prepare(cls, config: Config, *, allow_changes: bool = False) -> Run:
        """The run directory of `config`, made where it is missing.

        Raises ConfigError where the directory belongs to a run whose journaled episodes `config` would misread.
        """
        run = cls(config.run.dir)
        run.dir.mkdir(parents=True, exist_ok=True)
        if run.config_file.exists():
            run._refuse_other(config, allow_changes)
        elif any(run.dir.iterdir()):
            raise ConfigError(f"{str(run.dir)!r} is not empty and not a run directory; choose another run.dir")
        record = {"config": config.model_dump(mode="json"), "base_dir": str(config.base_dir)}
        _write_atomic(run.config_file, json.dumps(record, indent=1))
        return run

    @property
    def config_file(self) -> Path:
        return self.dir / "config.json"

    @property
    def journal(self) -> Path:
        return self.dir / "journal.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def model(self) -> Path:
        return self.dir / "model"

    @property
    def curve(self) -> Path:
        return self.dir / "curve.png"

    @property
    def held_out(self) -> Path:
        return self.dir / "held_out.jsonl"

    def config(self) -> Config:
        """The configuration of the last start."""
        try:
            record = json.loads(self.config_file.read_text())
            config = Config.parse(record["config"], source=str(self.config_file))
            config._base_dir = Path(record["base_dir"])
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{self.config_file} is damaged: {error}; start with the original TOML file") from None
        # The directory may have been moved or mounted elsewhere since.
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": self.dir})})

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the last committed step that has one."""
        last = read_last_step(self.journal) if self.journal.exists() else None
        return self.checkpoints / last.checkpoint if last is not None and last.checkpoint else None

    def status(self) -> RunStatus:
        return read_status(self.journal)

    def steps(self) -> list[Point]:
        """(step, metrics) of every committed step of the surviving lineage."""
        return read_steps(self.journal)

    def evaluations(self) -> list[Point]:
        """(step, metrics) of every evaluation; the newest of a step counts."""
        if not self.held_out.exists():
            return []
        latest: dict[int, Mapping[str, float]] = {}
        for line in self.held_out.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the torn last line of a killed process
                continue
            latest[record["step"]] = record["metrics"]
        return sorted(latest.items())

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.held_out.open("a") as file:
            # A line of its own even after a torn one.
            file.write(("\n" if file.tell() else "") + json.dumps({"step": step, "metrics": dict(metrics)}))
            file.flush()
            os.fsync(file.fileno())

    def draw(self) -> None:
        config = self.config()
        title = f"{self.dir.name}: {band_title(config.learner.loss.model_dump())}"
        draw(self.curve, self.steps(), self.evaluations(), title)

    def _refuse_other(self, config: Config, allow_changes: bool) -> None:
        before, now = self.config().identity(), config.identity()
        changed = [name for name in now if before[name] != now[name]]
        if changed and not allow_changes:
            lines = "\n".join(f"  {name}: {_short(before[name])} there, {_short(now[name])} here" for name in changed)
            raise ConfigError(
                f"{str(self.dir)!r} holds a run of another configuration:\n{lines}\n"
                "Use another run.dir, or --allow-changes to go on all the same."
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
