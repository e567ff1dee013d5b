"""`gspo-agent status` beside a living process, after its death, on a copy, and where the journal cannot be opened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gspo_agent import cli
from gspo_agent.config import Config, RolloutConfig
from gspo_agent.rollout import live as live_room
from gspo_agent.rollout import schema
from gspo_agent.rollout.pulse import Pulse
from gspo_agent.rollout.stages import Phase
from gspo_agent.run import Run
from gspo_agent.testing import ScriptedEngine
from tests.rollout import scene
from tests.rollout.scene import Shop, shopper, until

VICTIM = """
import asyncio, sys
from pathlib import Path
from gspo_agent.config import RolloutConfig
from gspo_agent.rollout import pulse as pulse_room, schema
from gspo_agent.rollout.pulse import Pulse
from gspo_agent.rollout.stages import Phase
from gspo_agent.testing import ScriptedEngine
from tests.rollout.scene import Run, Shop, shopper, until

async def main(path, network):
    schema.on_network = lambda path: network
    pulse_room._SLOW_SECONDS, pulse_room._SHARE = 0.05, 1
    engine = ScriptedEngine(shopper, chunk=4)
    engine.hold_at = 340
    config = RolloutConfig(group_size=2, groups_per_step=2, over_provision=1.0, journal_tokens=48)
    with Run(path, Shop, config, engine=engine) as run:
        with Pulse(run.journal, lambda: Phase("waiting for groups", 0.0), patience=60.0, every=0.05) as pulse:
            pulse.watch(run.collector, engine)
            await run.collector.start(0)
            await until(lambda: len(engine.held) == 4)
            await run.journal.transact(lambda connection: None)
            await until(lambda: pulse._ledger is not None and pulse._ledger.slots.get("running") == 4)
            pulse.look()
            print("held", flush=True)
            await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "network"))
"""


def prepared(directory: Path) -> Run:
    config = Config.parse({"model": "tiny", "env": [{"id": "a:B"}], "run": {"dir": str(directory)}})
    run = Run.prepare(config)
    run.record_config(config)
    return run


@contextmanager
def living(run: Run, network: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the run, with four requests held inside a turn."""
    command = [sys.executable, "-c", VICTIM, str(run.journal), "network" if network else "local"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def status(run: Run, *options: str) -> str:
    result = CliRunner().invoke(cli.app, ["status", str(run.dir), *options])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def as_json(run: Run) -> Any:
    result = CliRunner().invoke(cli.app, ["status", str(run.dir), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_alive_then_silent_then_dead_then_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared(tmp_path / "run")
    assert "not begun" in status(run)
    with living(run) as process:
        text = status(run)
        assert f"{run.dir}: running, life 1, step 0; pid {process.pid} on" in text
        assert "doing: waiting for groups" in text
        assert "groups: open 2" in text
        assert "episodes: running 4" in text
        assert "in flight, by what they wait for: tokens 4" in text
        seen = as_json(run)
        at_most, lost = seen["restart_loses"]["kill_at_most"], seen["live"]["loss"]["sampled"]
        assert 0 < lost < at_most <= 4 * 48
        assert sum(episode["unjournaled"] for episode in seen["in_flight"]) == lost
        assert f"lose: 0 tokens after Ctrl-C or SIGTERM; at most {at_most} tokens after kill -9 (4 running" in text
        assert f"to stop it: Ctrl-C there, or kill {process.pid}; then gspo-agent resume {run.dir} goes on" in text
        assert status(run, "--all").count("turn ") == 4
        copy = Run(tmp_path / "copy")
        shutil.copytree(run.dir, copy.dir)
        assert f"{copy.dir}: a copy, life 1" in status(copy)
        assert f"a copy of {run.dir} on " in status(copy)
        os.kill(process.pid, signal.SIGSTOP)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 100)
        assert f"{run.dir}: silent, life 1" in status(run)
        monkeypatch.undo()
        process.kill()
        process.wait()
        text = status(run)
        assert f"{run.dir}: died, life 1, step 0; pid {process.pid} on" in text
        assert "doing:" not in text
        assert "in flight, by what they wait for: tokens 4" in text
        assert f"would lose: 0 tokens (its end has cost at most {at_most}: 4 requests ran at the last look)" in text
        assert f"to go on: gspo-agent resume {run.dir}" in text
        assert {e["id"] for e in as_json(run)["in_flight"]} == {e["id"] for e in seen["in_flight"]}


def test_with_the_journal_locked_by_a_process_on_a_network_file_system(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    with living(run, network=True) as process:
        text = status(run)
        assert f"{run.dir}: running, life 1, step 0; pid {process.pid} on" in text
        assert "groups: open 2" in text
        assert "episodes: running 4" in text
        assert "in flight, by what they wait for: tokens 4" in text
        assert "the journal can't be read from here" in text
        assert "this is what its process read " in text
        assert as_json(run)["groups"] == {"open": 2}
        process.kill()
        process.wait()
        assert "died" in status(run)
        assert "can't be read" not in status(run)


def test_a_directory_that_can_only_be_read_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared(tmp_path / "run")
    with living(run) as process:
        process.kill()
        process.wait()
    # Tests may run as root, whom no permission stops; a read-only mount would.
    monkeypatch.setattr(schema.os, "access", lambda path, mode: mode != os.W_OK)
    before = {path: path.stat().st_mtime_ns for path in run.dir.rglob("*")}
    assert "died, life 1" in status(run)
    assert {path: path.stat().st_mtime_ns for path in run.dir.rglob("*")} == before


async def test_a_run_that_stopped_says_so_and_what_it_would_go_on_with(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    engine = ScriptedEngine(shopper)
    await engine.pause()
    config = RolloutConfig(group_size=2, groups_per_step=2, over_provision=1.0)
    with (
        scene.Run(run.journal, Shop, config, engine=engine) as played,
        Pulse(played.journal, lambda: Phase("learning", 0.0), patience=60.0) as pulse,
    ):
        pulse.watch(played.collector, engine)
        await played.collector.start(0)
        await until(lambda: played.collector.progress().generating == 4)
        await played.collector.stop()
    text = status(run)
    assert f"{run.dir}: not running, life 1, step 0; pid {os.getpid()} on" in text
    assert " stopped " in text
    assert "in flight, by what they wait for: tokens 4" in text
    assert "a restart now would lose: 0 tokens" in text


async def test_ages_attempts_and_groups_that_were_given_up_are_told(tmp_path: Path) -> None:
    class Moody(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            super().setup(task)
            if self.episode_id.startswith("1."):
                raise ConnectionError("no till")

    run = prepared(tmp_path / "run")
    config = RolloutConfig(
        group_size=2, groups_per_step=1, over_provision=3.0, max_attempts=2, filter_zero_variance=False
    )
    engine = ScriptedEngine(shopper, weight_version=1_000_000)
    with scene.Run(run.journal, Moody, config, engine=engine) as played:
        await played.collector.start(0)
        for step in (1, 2):
            lease = await played.collector.lease(1, step=step)
            counted = {"count/verdict/equal:num": 2.0, "count/verdict/timeout": float(step == 2), "reward/mean": 1.0}
            await played.ledger.commit_step(step, lease, (f"step-{step}", "h"), counted)
        await until(lambda: played.ledger.status().groups.get("given_up"))
        await played.collector.stop()
    text = status(run)
    assert "step 2 (checkpoint step-2)" in text
    assert "given_up 1" in text
    assert "given up: group 1 (task 0 of [[env]] 0), EnvError: Moody.setup: ConnectionError: no till" in text
    assert "tried again: 2 in attempt 2" in text
    assert "failed 4 times: EnvError: Moody.setup: ConnectionError: no till" in text
    assert "verdict: equal:num 4, timeout 1" in text
    assert as_json(run)["counted"] == {"verdict": {"equal:num": 4, "timeout": 1}}
    ages = as_json(run)["staleness"]
    # Sampled under the weights of step 0, trained on by step 2.
    assert list(ages["last step"]) == ["2"]
    assert "age of tokens in steps, last step: 2: " in text
    assert set(ages["ready"]) <= {"3"}


def test_a_record_that_is_torn_or_of_an_earlier_life_is_not_believed(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    with living(run) as process:
        process.kill()
        process.wait()
    record = run.dir / live_room.NAME
    whole = record.read_bytes()
    record.write_bytes(whole[:100])
    assert "died, life 1" in status(run)
    record.write_bytes(whole)
    with scene.Run(run.journal):
        text = status(run)
    assert "running, life 2" in text
    assert "doing:" not in text
    assert "the process does not say what a kill -9 would cost" in text
