"""A short campaign loses nothing; and one in which something is broken on purpose does not pass."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import faults
from tests.faults.campaign import Campaign
from tests.faults.sabotage import SABOTAGES
from tests.faults.scenario import Scenario
from tests.faults.zygote import ROOT, Zygote


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("scripted", 8),
        pytest.param("local", 12, marks=pytest.mark.slow),
        pytest.param(None, 120, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_faults_of_every_kind_lose_nothing(zygote: Zygote, engine: str | None, number: int) -> None:
    report = Campaign(number, seed=3, engine=engine).run(zygote)
    assert report.losses == []
    assert report.faults == number


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(300)]) for name in SABOTAGES],
)
def test_a_broken_guarantee_is_found(zygote: Zygote, name: str) -> None:
    # The world of the tools: the others have no use for some of the guarantees.
    how = {"engine": "scripted", "world": "till", "only": SABOTAGES[name][1], "patience": 1}
    assert Campaign(30, seed=1, sabotage=name, **how).run(zygote).losses


@pytest.mark.slow
def test_the_command_exits_with_one_on_a_loss_and_prints_the_table_last() -> None:
    command = [sys.executable, "-m", "tests.campaign", "--faults", "4", "--engine", "scripted", "--only", "second"]
    good = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout
    assert good.stdout.rstrip().endswith("0 losses")
    bad = subprocess.run([*command, "--sabotage", "open_door"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "LOSS: " in bad.stdout


def test_the_seed_decides_what_is_done() -> None:
    def drawn(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [Scenario.draw(rng), *(faults.draw(rng, "scripted", "till") for _ in range(20))]

    assert drawn(1) == drawn(1) != drawn(2)


def test_the_last_commit_of_a_log_is_where_sqlite_finds_it(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "x.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (x)")
    ends = [faults.last_commit(Path(f"{path}-wal").read_bytes())]
    connection.execute("INSERT INTO t VALUES (randomblob(20000))")
    content = Path(f"{path}-wal").read_bytes()
    ends.append(faults.last_commit(content))
    assert ends[0] < ends[1] == len(content)
    assert faults.last_commit(content[:-10]) == ends[0]
    connection.close()
