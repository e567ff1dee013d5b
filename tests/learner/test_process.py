"""A learner elsewhere computes the same, is cut at once, and never outlives whoever started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gspo_agent.errors import ConfigError, JournalError, LearnerError
from gspo_agent.learner.batch import Batch, make_batch
from gspo_agent.learner.learner import Learner
from gspo_agent.learner.process import LearnerProcess
from gspo_agent.learner_config import LearnerConfig
from tests.learner.models import qwen3, sampled_groups, saved_qwen3
from tests.sandbox.survivors import gone

CONFIG = LearnerConfig(lr=1e-2, mini_batches=2, device="cpu")
HOW = {"temperature": 1.0, "total_steps": 3, "seed": 0}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(sampled_groups(qwen3(), groups=2), step=1, max_weight_lag=None, advantage_std=True)


@pytest.fixture(scope="module")
def elsewhere(model_path: Path) -> Iterator[LearnerProcess]:
    process = LearnerProcess(CONFIG, model_path, **HOW)
    yield process
    process.close()
    assert gone(process.pid)


def test_steps_weights_and_checkpoints_are_those_of_a_learner_in_this_process(
    elsewhere: LearnerProcess, model_path: Path, batch: Batch, tmp_path: Path
) -> None:
    here = Learner(CONFIG, model_path, **HOW)
    ours, theirs = here.step(batch), elsewhere.step(batch)
    ours.pop("learner_cpu_seconds")
    theirs.pop("learner_cpu_seconds")
    assert ours == theirs
    saved = elsewhere.save(tmp_path, 1)
    assert saved.digest == here.save(tmp_path / "here", 1).digest
    here.step(batch)
    assert here.restore(saved.path, saved.digest) == elsewhere.restore(saved.path, saved.digest) == 1
    weights, own = elsewhere.weights(1_000_001), here.model.state_dict()
    assert weights.version == 1_000_001
    named = dict(weights.tensors())
    assert {own[name].data_ptr() for name in named} == {tensor.data_ptr() for tensor in own.values()}
    assert all(torch.equal(tensor, own[name]) for name, tensor in named.items())


def test_errors_come_back_as_what_they_are(elsewhere: LearnerProcess, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist"):
        elsewhere.restore(tmp_path / "step-9")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        LearnerProcess(CONFIG, tmp_path / "nothing", **HOW)
    with pytest.raises(LearnerError, match="AttributeError"):
        elsewhere.step("no batch")  # type: ignore[arg-type]


def compute(learner: Learner) -> None:
    """A step that never ends."""
    while True:
        pass


@pytest.mark.slow
def test_it_ends_with_a_killed_parent_even_while_it_computes(model_path: Path) -> None:
    code = (
        "import sys, time, threading; from gspo_agent.learner.process import LearnerProcess\n"
        "from tests.learner.test_process import CONFIG, HOW, compute\n"
        "process = LearnerProcess(CONFIG, sys.argv[1], **HOW)\n"
        "threading.Thread(target=process._ask, args=(compute,), daemon=True).start()\n"
        "print(process.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(model_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)


def test_it_ends_with_its_parent_before_it_has_imported_anything() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        command = [sys.executable, "-X", "importtime", "-m", "gspo_agent.learner", str(theirs.fileno())]
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0
    assert not [line for line in ended.stderr.splitlines() if line.endswith(" torch")]


def test_signals_for_the_parent_do_not_stop_it_and_its_death_is_named(elsewhere: LearnerProcess, batch: Batch) -> None:
    process = elsewhere  # the last test to use it
    assert os.getpgid(process.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert process.step(batch)["updates"] == 2
    os.kill(process.pid, signal.SIGSTOP)  # as if it computed for a long time
    threading.Timer(0.1, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(LearnerError, match=rf"pid {process.pid}\) ended with status -9.*same command again"):
        process.step(batch)
