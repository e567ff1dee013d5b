"""Servers of a run directory: started by a run, or by `gspo-agent serve` for every run in it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gspo_agent import trainer
from gspo_agent.config import Config
from gspo_agent.engine.server import command
from gspo_agent.engine.servers import read_servers
from gspo_agent.errors import ConfigError, RunLocked
from gspo_agent.evaluate import evaluate_policy
from gspo_agent.interruption import CUT
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout.audit import audit
from gspo_agent.serving import options, shared_out
from tests.sandbox.survivors import alive, descendants
from tests.test_trainer import cache, config  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[1]
SERVERS = (
    'engine={kind="sglang", servers={count=2, module="gspo_agent.testing.sglang_server", '
    "args={vocab_size=420, delay=0.002}}}"
)


def served(directory: Path, *overrides: str) -> Config:
    return config(directory, SERVERS, "evaluation.episodes=0", *overrides)


async def until_step(directory: Path, step: int, task: asyncio.Task[Any]) -> None:
    while not (directory / "weights" / f"step-{step}").exists():
        assert not task.done(), task.result()
        await asyncio.sleep(0.005)


def urls(directory: Path) -> list[str]:
    return [server["url"] for server in read_servers(directory / "servers")["servers"]]


def processes(directory: Path) -> list[set[int]]:
    """Of each server."""
    return [descendants(server["pid"]) for server in read_servers(directory / "servers")["servers"]]


async def test_a_run_starts_its_servers_outlives_the_death_of_one_and_leaves_no_process(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = served(directory, "run.steps=12")
    screen = Screen(settings, Console(file=io.StringIO(), width=1000))
    training = asyncio.create_task(trainer.train_async(settings, screen=screen))
    await until_step(directory, 1, training)
    before = processes(directory)
    for pid in before[0]:
        os.kill(pid, signal.SIGKILL)
    while not (after := processes(directory))[0].isdisjoint(before[0]):
        assert not training.done(), "the run ended before its server was there again; give it more steps"
        await asyncio.sleep(0.005)
    assert f"{urls(directory)[0]}: " in screen._line().plain
    run = await training
    assert [step for step, _ in run.steps()] == list(range(1, 13))
    assert run.status().slots.get("failed", 0) == 0
    assert audit(run.journal).breaches == ()
    assert alive(set().union(*before, *after)) == set()
    said = screen.console.file.getvalue()  # type: ignore[attr-defined]
    assert "ended with status -9; it is started again in" in said
    for url in urls(directory):  # what is scripted is nobody's log-probability
        assert f"{url} and the learner differ by" in said


def serve(directory: Path) -> subprocess.Popen[str]:
    """`gspo-agent serve`, whose servers are ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gspo_agent.cli", "serve", str(_toml(directory))],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    while "all are ready" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return process


def _toml(directory: Path) -> Path:
    """The configuration as a file: what `config` gives, in JSON's subset of TOML."""
    data = served(directory).model_dump(mode="json", exclude_none=True)
    path = directory.with_suffix(".toml")

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    path.write_text("\n".join(f"{name} = {value(item)}" for name, item in data.items()))
    return path


@pytest.mark.slow
async def test_runs_use_the_servers_of_serve_which_end_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    serving = await asyncio.to_thread(serve, directory)
    every = set().union(*processes(directory))
    for steps in (1, 2):
        run = await trainer.train_async(served(directory, f"run.steps={steps}"))
        assert len(run.steps()) == steps
    assert set().union(*processes(directory)) == every
    begun = time.monotonic()
    serving.send_signal(signal.SIGINT)
    said, _ = await asyncio.to_thread(serving.communicate)
    assert time.monotonic() - begun < 3
    assert serving.returncode == CUT, said
    assert alive(every) == set()


async def test_nobody_else_gives_other_weights_to_servers_that_a_run_samples_from(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    training = asyncio.create_task(trainer.train_async(served(directory, "run.steps=1000")))
    await until_step(directory, 1, training)
    with pytest.raises(RunLocked, match="are those of another command"):
        await evaluate_policy(served(directory), None)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training


def gpus(*overrides: str, visible: int = 8) -> list[list[str]]:
    return shared_out(served(Path("x"), *overrides), [f"GPU-{n}" for n in range(visible)])


def test_every_server_has_gpus_of_its_own_beside_the_learners() -> None:
    assert gpus() == [["GPU-1"], ["GPU-2"]]
    assert gpus("engine.servers.tp=2") == [["GPU-1", "GPU-2"], ["GPU-3", "GPU-4"]]
    assert gpus("engine.servers.count=1", "engine.servers.dp=2", "learner.device=cuda:1") == [["GPU-0", "GPU-2"]]
    assert gpus("learner.device=cpu") == [["GPU-0"], ["GPU-1"]]
    assert gpus("engine.servers.gpus=[0, 0]") == [["GPU-0"], ["GPU-0"]]
    assert gpus("engine.servers.args.device=cpu") == []
    assert gpus(visible=0) == []


def test_servers_that_share_the_learners_gpus_can_release_their_memory() -> None:
    shared = served(Path("x"), "engine.placement=colocated")
    assert shared_out(shared, ["0", "1"]) == [["0"], ["1"]]
    assert options(shared, [["0"], ["1"]]).args["enable_memory_saver"] is True
    assert "enable_memory_saver" not in options(served(Path("x")), [["0"]]).args
    assert "enable_memory_saver" not in options(shared, []).args  # on a CPU there is none


def test_servers_of_a_run_that_trains_an_adapter_are_started_for_it() -> None:
    adapter = served(Path("x"), "learner.lora={rank=4, targets=['q_proj', 'v_proj']}")
    args = options(adapter, []).args
    assert (args["enable_lora"], args["max_lora_rank"], args["lora_target_modules"]) == (True, 4, ["q_proj", "v_proj"])
    assert args["vocab_size"] == 420
    line = " ".join(command(options(adapter, []), Path("m"), 1))
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules q_proj v_proj" in line
    for wrong in ('engine.weights="tensor"', 'engine.placement="colocated"', "engine.servers.dp=2"):
        with pytest.raises(ConfigError, match=r"learner\.lora"):
            served(Path("x"), "learner.lora={}", wrong)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.servers.tp=4", r"needs count \* tp \* dp = 8 GPUs, and of 8 there are 7 for it"),
        ("engine.servers.gpus=[8, 1]", "engine.servers.gpus names 8, but this process sees 8 GPUs"),
    ],
)
def test_too_few_gpus_are_named_before_anything_is_started(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpus(override)
