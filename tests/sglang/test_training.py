"""A whole run on real SGLang servers, as a person starts one: `gspo-agent serve`, `gspo-agent train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path

import pytest

from gspo_agent.engine.servers import read_servers
from gspo_agent.interruption import CUT
from gspo_agent.rollout.audit import audit
from gspo_agent.run import Run
from gspo_agent.trajectory import version_step
from tests.sandbox.survivors import alive, descendants
from tests.sglang.asking import ON_REAL_SERVERS
from tests.sglang.real import PYTHON

pytestmark = ON_REAL_SERVERS
ROOT = Path(__file__).parents[2]
SERVERS = f"""{{count = 2, python = "{PYTHON}", env = {{
    PYTHONPATH = "{ROOT}/tests/sglang/stand_in", SGLANG_USE_CPU_ENGINE = "1", OMP_NUM_THREADS = "1",
    HF_HUB_OFFLINE = "1"
}}, args = {{
    device = "cpu", attention_backend = "torch_native", sampling_backend = "pytorch", dtype = "float32",
    mem_fraction_static = 0.1, max_total_tokens = 65536
}}}}""".replace("\n", " ")
SMALL = [
    "cold_start={vocab_size=720, hidden_size=32, layers=1, demonstrations=64, steps=4, context_tokens=512}",
    "cold_start.batch_size=8",
    "env.0.limits={turns=2, turn_tokens=64, context_tokens=512}",
    "rollout={group_size=4, groups_per_step=2, filter_zero_variance=false}",
    "evaluation.episodes=0",
]  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts gspo-agent with the coding example in `tmp_path/run`; what it says is in a file of the command's name."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *overrides: str) -> subprocess.Popen[bytes]:
        line = ["gspo_agent.cli", name, "examples/code_agent.toml", "engine.kind=sglang", f"run.dir={tmp_path / 'run'}"]
        with (tmp_path / name).open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", *line, *SMALL, *overrides],
                cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait(true: Callable[[], object], process: subprocess.Popen[bytes], said: Path, seconds: float = 500) -> None:
    until = time.monotonic() + seconds
    while not true():
        if process.poll() is not None or time.monotonic() > until:
            pytest.fail(f"{said.name} came to nothing, status {process.returncode}:\n{said.read_text()}")
        time.sleep(0.1)


def weights_of(url: str) -> str:
    """What a server calls its weights; "" where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
            return str(json.load(answer)["weight_version"])
    except OSError:
        return ""


def test_a_run_trains_on_served_servers_and_kill_9_of_one_costs_no_episode(
    command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    serve = command("serve", f"engine.servers={SERVERS}")
    wait(lambda: "all are ready" in (tmp_path / "serve").read_text(), serve, tmp_path / "serve")
    servers = read_servers(directory / "servers")["servers"]
    urls = [server["url"] for server in servers]

    train = command("train", "run.steps=1000")
    wait(lambda: (directory / "weights" / "step-1").exists(), train, tmp_path / "train")
    every = set().union(*(descendants(server["pid"]) for server in servers))
    victim = descendants(servers[1]["pid"]) - {servers[1]["pid"]}
    os.kill(min(victim), signal.SIGKILL)  # the server itself, which began first
    wait(lambda: weights_of(urls[1]) == "", train, tmp_path / "train")
    wait(lambda: weights_of(urls[1]) == weights_of(urls[0]) != "default", train, tmp_path / "train")
    train.send_signal(signal.SIGINT)
    assert train.wait(10) == CUT
    said = (tmp_path / "train").read_text()
    assert "differ by" not in said, said  # before the first step the engine's logprobs were the learner's

    cut_at = len(Run.open(directory).steps())
    again = command("train", f"run.steps={cut_at + 2}", f'engine.urls=["{urls[0]}", "{urls[1]}"]')
    assert again.wait(300) == 0, (tmp_path / "train").read_text()
    run = Run.open(directory)
    steps = run.steps()
    assert [step for step, _ in steps] == list(range(1, cut_at + 3))
    assert all(isfinite(metrics["reward/mean"]) for _, metrics in steps)
    # None where nothing was sampled under the newest weights; what was computed under older ones stays in place.
    log_s = [abs(value) for _, metrics in steps if (value := metrics.get("log_s_at_zero_updates/mean")) is not None]
    assert len(log_s) > len(steps) // 2
    assert log_s[0] < 1e-4
    versions = [int(weights_of(url).partition("@")[0]) for url in urls]
    assert [version_step(version) for version in versions] == [cut_at + 2] * 2
    assert run.status().slots.get("failed", 0) == 0
    assert audit(run.journal).breaches == ()
    print(f"{len(steps)} steps, |log s| at zero updates {log_s[0]:.2g} in the first, {max(log_s):.2g} at most")

    every |= set().union(*(descendants(server["pid"]) for server in read_servers(directory / "servers")["servers"]))
    serve.send_signal(signal.SIGINT)
    assert serve.wait(10) == CUT
    assert alive(every) == set()


def test_a_run_trains_an_adapter_on_a_server_that_it_starts(
    command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    servers = SERVERS.replace("count = 2", "count = 1").replace("args = {", 'args = { lora_backend = "torch_native",')
    lora = 'learner.lora={rank=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"]}'
    train = command("train", f"engine.servers={servers}", lora, "learner.lr=1e-3", "run.steps=4")
    directory = tmp_path / "run"
    wait(lambda: (directory / "weights" / "step-1").exists(), train, tmp_path / "train")
    assert any((directory / "servers" / "0.tmp").iterdir())
    assert train.wait(300) == 0, (tmp_path / "train").read_text()
    said = (tmp_path / "train").read_text()
    assert "differ by" not in said, said
    run = Run.open(directory)
    assert len(run.steps()) == 4
    log_s = [
        abs(value) for _, metrics in run.steps() if (value := metrics.get("log_s_at_zero_updates/max")) is not None
    ]
    assert max(log_s) < 1e-4  # of every step: who goes on under another adapter computes everything under that
    assert sorted(path.name for path in run.weights.iterdir()) == ["step-3", "step-4"]
    assert not (directory / "servers" / "0.tmp").exists()
    assert run.status().slots.get("failed", 0) == 0
    assert audit(run.journal).breaches == ()
    print(f"|log s| at zero updates {max(log_s):.2g} at most in {len(log_s)} of {len(run.steps())} steps")
