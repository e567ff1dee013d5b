"""Campaign: many runs, many faults, one table."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import faults
from tests.faults.faults import DIED, MISSED, WENT_ON, Fault
from tests.faults.judge import Judge
from tests.faults.models import save_model
from tests.faults.scenario import Scenario
from tests.faults.subject import Loss, Subject
from tests.faults.zygote import Zygote

_FAULTS_PER_RUN = (4, 12)
_BROKE, _LOSS = "broke it", "in a run with a loss"
_HITS = (DIED, WENT_ON, _BROKE)
_MOST_RUNS = 2  # per fault that is asked for; more have nothing that it could hit


@dataclass(slots=True)
class Report:
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Kind of fault -> outcome -> number."""
    losses: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    broken: int = 0
    """Runs with a loss."""

    @property
    def faults(self) -> int:
        """Those that hit something."""
        return sum(row[name] for row in self.outcomes.values() for name in _HITS)

    def __str__(self) -> str:
        names = (*_HITS, MISSED, _LOSS)
        width = max(map(len, [*self.outcomes, "fault"]))
        lines = [f"LOSS: {loss}" for loss in self.losses]
        lines += ["", f"{'fault':<{width}}  {'number':>7}" + "".join(f"  {name:>20}" for name in names)]
        for kind, row in sorted(self.outcomes.items()):
            hits = sum(row[name] for name in _HITS)
            lines.append(f"{kind:<{width}}  {hits:>7}" + "".join(f"  {row[name]:>20}" for name in names))
        total = sum(self.outcomes.values(), Counter[str]())
        lines.append(f"{'all':<{width}}  {self.faults:>7}" + "".join(f"  {total[name]:>20}" for name in names))
        lines += ["", f"{self.runs} runs: " + ", ".join(f"{number} {name}" for name, number in self.counts.items())]
        return "\n".join([*lines, f"{len(self.losses)} losses"])


@dataclass(frozen=True, slots=True)
class Campaign:
    """Runs with faults until `number` of them have hit something; a function of `seed` but for what time decides."""

    number: int
    seed: int
    only: str | None = None
    mode: str | None = None
    engine: str | None = None
    world: str | None = None
    sabotage: str | None = None
    keep: bool = False
    """Leave the folder of a run with a loss where it is."""
    patience: int = 10
    """Runs with a loss after which the campaign ends."""
    show: Callable[[str], None] = lambda line: None

    def run(self, zygote: Zygote | None = None) -> Report:
        """All of it; with a `zygote` that is there already, seconds sooner."""
        report = Report()
        began = time.monotonic()
        root = Path(tempfile.mkdtemp(prefix="gspo-faults-", dir=_memory()))
        try:
            with nullcontext(zygote) if zygote else Zygote(["tests.faults.victim"]) as zygote:
                save_model(root / "model")
                while report.faults < self.number and report.broken < self.patience:
                    if report.runs > _MOST_RUNS * self.number:
                        report.losses.append(f"{report.runs} runs had too little for {self.number} faults to hit")
                        break
                    self._one_run(root, zygote, report)
                    spent = time.monotonic() - began
                    self.show(
                        f"{report.faults}/{self.number} faults, {report.runs} runs, {len(report.losses)} losses, "
                        f"{spent:.0f} s"
                    )
        finally:
            if not (self.keep and report.losses):
                shutil.rmtree(root, ignore_errors=True)
        return report

    def _one_run(self, root: Path, zygote: Zygote, report: Report) -> None:
        rng = random.Random(f"{self.seed}.{report.runs}")
        scenario = Scenario.draw(rng, self.engine, self.mode, self.world or faults.world_for(self.only))
        number = min(rng.randint(*_FAULTS_PER_RUN), self.number - report.faults)
        chosen = [faults.draw(rng, scenario.engine, scenario.world, self.only) for _ in range(number)]
        folder = root / f"run-{report.runs}"
        shutil.copytree(root / "model", folder / "model")
        happened: list[tuple[Fault, str]] = []
        losses: list[str] = []
        with Subject(folder, scenario, zygote, self.sabotage) as subject:
            judge = Judge(subject)
            try:
                _suffer(subject, judge, chosen, happened)
                judge.verdict()
            except Loss as loss:
                losses.append(str(loss))
            losses += judge.losses
            if losses and self.keep:
                shutil.copytree(folder / "disk", folder / "kept")
        where = f"run {report.runs} ({scenario}; seed {self.seed}; {', '.join(fault.kind for fault, _ in happened)})"
        report.losses += [f"{where}: {loss}" for loss in losses[:5]]
        for fault, outcome in happened:
            row = report.outcomes.setdefault(fault.kind, Counter())
            row[outcome] += 1
            row[_LOSS] += bool(losses)
        for name, count in judge.counts.items():
            report.counts[name] = (
                max(report.counts[name], count) if name.startswith("most") else report.counts[name] + count
            )
        report.runs += 1
        report.broken += bool(losses)
        if not (losses and self.keep):
            shutil.rmtree(folder, ignore_errors=True)


def _suffer(subject: Subject, judge: Judge, chosen: list[Fault], happened: list[tuple[Fault, str]]) -> None:
    """All faults, and then a life that comes to the end of the run."""
    for fault in chosen:
        happened.append((fault, _BROKE))
        happened[-1] = (fault, fault.happen(subject))
        if subject.life is None:
            judge.look()
    judge.finish()


def _memory() -> str | None:
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() else None
