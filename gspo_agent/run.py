"""Run: the directory that a training run lives in, from the outside.

config.json      the configuration of the last start
model/           the model it began with, where the run made it itself
journal.sqlite   every episode, group and step (see `rollout.journal`)
checkpoints/     step-N directories, each loadable by transformers, or an adapter's as PEFT has it
weights/         step-N directories that servers load, the newest two
servers/         N.log and N.tmp of the servers that were started here, and servers.json: where they are
episodes/        step-N.parquet: the episodes that have left the journal, where the run exports them
held_out.jsonl   one line per evaluation
curve.png        the learning curve, drawn after every step
live.json        what the running process says about itself, every two seconds (see `rollout.live`)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_agent.config import Config
from gspo_agent.errors import ConfigError, JournalError, NotBegun, written
from gspo_agent.monitor.curve import Point, band_title, draw
from gspo_agent.monitor.report import Report, read_report
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

        Raises ConfigError where the directory belongs to a run whose journaled episodes `config` would misread, and
        JournalError where nothing can be written.
        """
        run = cls(config.run.dir)
        with written(run.dir):
            run.dir.mkdir(parents=True, exist_ok=True)
            ours = (run.journal.name, run.servers.name)  # neither says whose run it is
            strangers = [path for path in run.dir.iterdir() if not path.name.startswith(ours)]
        if not run.journal.exists() and any(run.checkpoints.glob("step-*")):
            raise JournalError(
                f"{str(run.dir)!r} has checkpoints but no {run.journal.name}, as if half of it had been copied; copy "
                "the rest too, or start another run.dir with model = 'THE_CHECKPOINT'"
            )
        if run.config_file.exists():
            if not allow_changes and run._begun():
                run._refuse_other(config)
        elif run.journal.exists():  # a kill between the two leaves a journal in which nothing has begun
            if not allow_changes and run._begun():
                raise ConfigError(
                    f"{str(run.dir)!r} has a journal and no {run.config_file.name} that says what it is of; with "
                    "--allow-changes the run goes on with this configuration, which has to be the one that it had"
                )
        elif strangers:
            raise ConfigError(f"{str(run.dir)!r} is not empty and not a run directory; choose another run.dir")
        return run

    def record_config(self, config: Config) -> None:
        """Keeps the configuration of this start; only for the process that has the run's lock."""
        record = {"config": config.model_dump(mode="json"), "base_dir": str(config.base_dir)}
        with written(self.config_file):
            _write_atomic(self.config_file, json.dumps(record, indent=1))

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
    def weights(self) -> Path:
        return self.dir / "weights"

    @property
    def servers(self) -> Path:
        return self.dir / "servers"

    @property
    def episodes(self) -> Path:
        return self.dir / "episodes"

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
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            why = " ".join(str(error).split())
            raise JournalError(
                f"{self.config_file} cannot be read: {type(error).__name__}: {why}; go on with "
                "`gspo-agent train THE_ORIGINAL.toml --allow-changes`, which writes it anew"
            ) from None
        # The directory may have been moved or mounted elsewhere since.
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": self.dir})})

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the last committed step that has one."""
        last = read_last_step(self.journal) if self.journal.exists() else None
        return self.checkpoints / last.checkpoint if last is not None and last.checkpoint else None

    def status(self) -> RunStatus:
        return read_status(self.journal)

    def report(self) -> Report:
        """All that can be told from outside, also where the journal can't be read."""
        return read_report(self.dir, self.journal)

    def steps(self) -> list[Point]:
        """(step, metrics) of every committed step of the surviving lineage."""
        return read_steps(self.journal)

    def evaluations(self) -> list[Point]:
        """(step, metrics) of every evaluation; the newest of a step counts."""
        if not self.held_out.exists():
            return []
        latest: dict[int, Mapping[str, float]] = {}
        for line in self.held_out.read_bytes().splitlines():
            try:
                record = json.loads(line)
                latest[record["step"]] = record["metrics"]
            except (ValueError, TypeError, KeyError):  # the torn last line of a killed process
                continue
        return sorted(latest.items())

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        with written(self.held_out), self.held_out.open("a") as file:
            # A line of its own even after a torn one.
            file.write(("\n" if file.tell() else "") + json.dumps({"step": step, "metrics": dict(metrics)}))
            file.flush()
            os.fsync(file.fileno())

    def draw(self) -> None:
        config = self.config()
        title = f"{self.dir.name}: {band_title(config.learner.loss.model_dump())}"
        with written(self.curve):
            draw(self.curve, self.steps(), self.evaluations(), title)

    def _begun(self) -> bool:
        """Whether anything is kept that another configuration would misread; a typo mended at once has cost nothing."""
        if self.model.exists():
            return True
        try:
            return self.journal.exists() and bool(self.status().groups)
        except NotBegun:
            return False
        except JournalError:  # its opening will say what is wrong with it
            return True

    def _refuse_other(self, config: Config) -> None:
        before, now = _flat(self.config().identity()), _flat(config.identity())
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if changed:
            lines = "\n".join(
                f"  {name}: {_short(before.get(name))} there, {_short(now.get(name))} here" for name in changed
            )
            raise ConfigError(
                f"{str(self.dir)!r} holds a run of another configuration:\n{lines}\n"
                "Use another run.dir, or --allow-changes to go on all the same."
            )


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by the names of their keys, so that only what differs is shown."""
    flat: dict[str, Any] = {}
    for name, value in identity.items():
        flat |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return flat


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
