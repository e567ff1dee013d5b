"""The whole machinery on a model of a few thousand weights: what a run leaves behind, and how it goes on."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from gspo_agent import trainer
from gspo_agent.cli import app
from gspo_agent.config import Config
from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import ConfigError, EnvError, LearnerError, RunLocked, TaskError
from gspo_agent.evaluate import evaluate_held_out, evaluate_policy
from gspo_agent.interruption import CUT
from gspo_agent.learner.process import LearnerProcess
from gspo_agent.messages import Message, assistant, call, tool_result, user
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout import export
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.journal import Journal
from gspo_agent.run import Run
from gspo_agent.testing.sglang_server import SGLangServer
from gspo_agent.trainer import train
from tests.testing.wire import weights_name


class Parrot(ToolEnv):
    """Rewards an answer by its length, so that every group has variance from the first step on."""

    def prompt(self, task: dict[str, Any]) -> str:
        return f"say {task['word']}"

    @tool
    def hear(self) -> str:
        """Hear the word."""
        return "word"

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"length": len(answer) / 100}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        return [{"word": f"{split}{n}"} for n in range(50)]

    @classmethod
    def demonstration(cls, rng: Any, progress: float, **options: Any) -> tuple[list[Message], list[dict[str, Any]]]:
        word = f"train{rng.randrange(50)}"
        heard = [assistant("", [call("hear")]), tool_result("word", name="hear")]
        return [user(f"say {word}"), *heard, assistant(word)], [cls.hear.schema]


class Broken(Parrot):
    def prompt(self, task: dict[str, Any]) -> str:
        raise KeyError("wrod")


def config(directory: Path, *overrides: str) -> Config:
    return Config.parse(
        {
            "model": "tiny",
            "env": [
                {"id": "tests.test_trainer:Parrot", "limits": {"turns": 3, "turn_tokens": 12, "context_tokens": 256}}
            ],
            "rollout": {"group_size": 2, "groups_per_step": 2, "max_attempts": 1},
            "learner": {"lr": 1e-3, "mini_batches": 2},
            "run": {"dir": str(directory), "steps": 2, "keep_checkpoints": 1},
            "evaluation": {"episodes": 3, "pass_threshold": 0.05},
            "cold_start": {
                "hidden_size": 32,
                "layers": 1,
                "heads": 2,
                "kv_heads": 1,
                "ffn_size": 32,
                "vocab_size": 420,
                "demonstrations": 40,
                "steps": 8,
                "batch_size": 8,
            },
        }
    ).override(overrides)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


async def test_a_run_on_servers_publishes_every_step_from_disk_and_outlives_one_of_them(tmp_path: Path) -> None:
    async with SGLangServer(vocab_size=420, delay=0.002) as one, SGLangServer(vocab_size=420, delay=0.002) as other:
        urls = f'engine={{kind="sglang", urls=["{one.url}", "{other.url}"]}}'
        training = asyncio.create_task(
            trainer.train_async(config(tmp_path / "run", urls, "run.steps=3", "evaluation.episodes=0"))
        )
        while weights_name(other) != "1000001":  # noqa: ASYNC110 -- the first step is published
            await asyncio.sleep(0.005)
        other.crash()
        run = await training
        assert [step for step, _ in run.steps()] == [1, 2, 3]
        assert weights_name(one) == "1000003"
        assert [Path(path).name for path, _ in one.control.loaded] == ["step-0", "step-1", "step-2", "step-3"]
        assert sorted(path.name for path in run.weights.iterdir()) == ["step-2", "step-3"]
        assert run.status().slots.get("failed", 0) == 0
        assert audit(run.journal).breaches == ()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["carry_over", "async"])
async def test_a_server_that_was_away_is_compared_with_the_learner_again(tmp_path: Path, mode: str) -> None:
    async with SGLangServer(vocab_size=420, delay=0.002) as one, SGLangServer(vocab_size=420, delay=0.002) as other:
        urls = f'engine={{kind="sglang", urls=["{one.url}", "{other.url}"]}}'
        settings = config(tmp_path / "run", urls, "run.steps=1000", "evaluation.episodes=0", f"rollout.mode={mode}")
        screen = Screen(settings, Console(file=io.StringIO(), width=1000))

        def compared() -> list[int]:
            said = screen.console.file.getvalue()  # type: ignore[attr-defined]
            return [said.count(f"{server.url} and the learner differ by") for server in (one, other)]

        def episodes(server: SGLangServer) -> list[str]:
            return [request.rid for request in server.scheduler.live if not request.rid.startswith("probe")]

        training = asyncio.create_task(trainer.train_async(settings, screen=screen))
        while compared() != [1, 1] or weights_name(other) == "1000000":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await other.stop()
        await asyncio.sleep(4)  # so long that it is looked at as another
        await other.restart()
        async with asyncio.timeout(30):
            while compared() != [1, 2]:
                assert not training.done()
                assert not episodes(other)
                await asyncio.sleep(0.005)
        async with asyncio.timeout(30):
            while not episodes(other):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training


async def test_a_run_that_trains_an_adapter_publishes_every_version_of_it_and_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    lora = ("learner.lora={rank=4}", "evaluation.episodes=0")
    async with SGLangServer(vocab_size=420, delay=0.002, lora=True) as server:
        urls = f'engine={{kind="sglang", urls=["{server.url}"]}}'
        for steps in (1, 2):
            run = await trainer.train_async(config(tmp_path / "run", urls, *lora, f"run.steps={steps}"))
        assert [step for step, _ in run.steps()] == [1, 2]
        assert [name.partition("@")[0] for name in server.adapters.loaded] == ["2000001", "2000002"]
        assert {Path(path).name for path, _ in server.control.loaded} == {"model"}
        named = {call.body.get("lora_path", "").partition("@")[0] for call in server.requests if "rid" in call.body}
        assert named >= {"1000000", "2000001"}
    assert sorted(path.name for path in run.weights.iterdir()) == ["step-1", "step-2"]
    assert run.status().slots.get("failed", 0) == 0
    assert audit(run.journal).breaches == ()
    with pytest.raises(ConfigError, match=r"lora\.rank: 4 there, null here"):
        await trainer.train_async(config(tmp_path / "run", "run.steps=3"))
    metrics = await evaluate_policy(run.config().override(["engine={}", "evaluation.episodes=1"]), run)
    assert metrics["episodes"] == 1


async def test_with_an_adapter_the_embedded_engine_and_the_learner_agree(tmp_path: Path) -> None:
    run = await trainer.train_async(config(tmp_path / "run", "learner.lora={rank=4}", "evaluation.episodes=0"))
    (_, first), (_, second) = run.steps()
    assert abs(first["log_s_at_zero_updates/max"]) < 1e-5
    assert second.get("log_s_at_zero_updates/max", 0.0) < 1e-5
    path = run.newest_checkpoint()
    assert path is not None
    whole = CliRunner().invoke(app, ["merge", str(run.dir), str(tmp_path / "whole")])
    assert whole.exit_code == 0, whole.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole").num_parameters() > 0
    with pytest.raises(ConfigError, match=r"is an adapter; .*gspo-agent merge"):
        await trainer.train_async(config(tmp_path / "other", f"model={path}"))


@pytest.mark.parametrize(
    ("mode", "weights", "placement"),
    [
        ("carry_over", "tensor", "colocated"),
        pytest.param("async", "distributed", "separate", marks=pytest.mark.slow),
    ],
)
async def test_a_run_brings_weights_to_servers_without_a_file_between(
    tmp_path: Path, mode: str, weights: str, placement: str
) -> None:
    async with SGLangServer(vocab_size=420, delay=0.002) as server:
        engine = f'{{kind="sglang", urls=["{server.url}"], weights="{weights}", placement="{placement}"}}'
        options = (f"engine={engine}", f"rollout.mode={mode}", "run.steps=2", "evaluation.episodes=0")
        run = await trainer.train_async(config(tmp_path / "run", *options))
        assert [step for step, _ in run.steps()] == [1, 2]
        assert weights_name(server) == "1000002"
        trained = AutoModelForCausalLM.from_pretrained(run.newest_checkpoint())
        (held,) = server.control.weights.tensors
        assert held.keys() == {name for name, _ in trained.named_parameters()}
        assert all(torch.equal(held[name], parameter) for name, parameter in trained.named_parameters())
        released = sum(call.route == "/release_memory_occupation" for call in server.requests)
        assert released == (2 if placement == "colocated" else 0)
        assert not run.weights.exists()
        assert run.status().slots.get("failed", 0) == 0


def test_a_run_leaves_steps_checkpoint_curve_and_evaluations_and_the_same_call_goes_on(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run"))
    assert [step for step, _ in run.steps()] == [1, 2]
    assert [step for step, _ in run.evaluations()] == [0, 2]
    assert run.newest_checkpoint() == run.checkpoints / "step-2"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-2"]
    assert run.curve.exists()

    run = train(config(tmp_path / "run", "run.steps=3"))
    assert [step for step, _ in run.steps()] == [1, 2, 3]
    assert [step for step, _ in run.evaluations()] == [0, 2, 3]
    result = audit(run.journal)
    assert result.breaches == ()
    assert result.lives == 2


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", "run.steps=1"))
    before = audit(run.journal)
    train(config(tmp_path / "run", "run.steps=1"))
    after = audit(run.journal)
    assert (after.steps, after.sampled_tokens) == (1, before.sampled_tokens)
    assert [step for step, _ in run.evaluations()] == [0, 1]


def test_on_policy_the_ratio_is_one_at_zero_updates(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", "run.steps=1", "rollout.temperature=0.7", "evaluation.episodes=0"))
    ((_, metrics),) = run.steps()
    assert metrics["log_s_at_zero_updates/max"] < 1e-5


def test_a_step_tells_what_was_not_computed_again_and_a_drift_of_the_engine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # At temperature 1 engine and learner may agree to the last bit, in a model as small as this.
    tight = ("run.steps=1", "evaluation.episodes=0", "learner.max_logprob_diff=1e-12", "rollout.temperature=0.7")
    ((_, metrics),) = train(config(tmp_path / "run", *tight)).steps()
    assert metrics["engine/tokens"] > 0
    assert 0 < metrics["engine/cached_share"] < 1
    figure = metrics["logprob_diff_at_zero_updates/mean"]
    assert 0 < figure < 1e-5
    assert f"they differ by {figure:.3g} in step 1" in " ".join(capsys.readouterr().out.split())


def test_an_environment_given_from_python_takes_the_place_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"failed.*rollout.max_failed.*wrod"):
        train(config(tmp_path / "run", "evaluation.episodes=0", "rollout.max_failed=0.01"), env=Broken)


def test_a_run_of_another_configuration_is_refused_unless_told(tmp_path: Path) -> None:
    train(config(tmp_path / "run", "run.steps=1", "evaluation.episodes=0"))
    other = config(tmp_path / "run", "run.steps=1", "rollout.group_size=3", "evaluation.episodes=0")
    with pytest.raises(ConfigError, match=r"group_size: 2 there, 3 here"):
        train(other)
    train(other, allow_changes=True)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty and not a run directory"):
        train(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_second_process_on_one_run_is_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run" / "journal.sqlite", durability="process"):
        (tmp_path / "run" / "config.json").write_text(
            '{"config": ' + config(tmp_path / "run").model_dump_json() + ', "base_dir": "/"}'
        )
        before = (tmp_path / "run" / "config.json").read_text()
        with pytest.raises(RunLocked):
            train(config(tmp_path / "run", "run.steps=99"))
        assert (tmp_path / "run" / "config.json").read_text() == before


class Untested(Parrot):
    @classmethod
    def tasks(cls, split: str, **options: Any) -> Any:
        return None if split == "test" else super().tasks(split)


def test_tasks_that_are_missing_are_named_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no tasks for split 'test'"):
        train(config(tmp_path / "run"), env=Untested)
    assert not (tmp_path / "run").exists()
    train(config(tmp_path / "run", "run.steps=1", "evaluation.episodes=0"), env=Untested)


def test_an_evaluation_in_which_everything_fails_is_said_and_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EnvError):
        train(config(tmp_path / "run", "rollout.max_failed=0.01"), env=Broken)
    assert "3 failed and are in no rate, the first with EnvError: Broken.prompt: KeyError: 'wrod'" in (
        capsys.readouterr().out
    )
    assert Run(tmp_path / "run").evaluations() == []


def test_old_episodes_leave_the_journal_as_files_and_the_audit_still_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("evaluation.episodes=0", "run.keep_steps=1", "run.export=true")
    run = train(config(tmp_path / "run", *short))
    assert [path.name for path in run.episodes.iterdir()] == ["step-000001.parquet"]
    result = audit(run.journal)
    assert (result.breaches, result.steps, result.groups["consumed"]) == ((), 2, 4)
    assert sum(result.groups.values()) == result.tasks
    assert pq.read_table(run.episodes).num_rows == 2 * result.retired
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gspo_agent\[data\]'"):
        train(config(tmp_path / "other", *short))
    assert not (tmp_path / "other").exists()


def test_fewer_steps_than_are_done_are_remarked_upon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path / "run", "evaluation.episodes=0"))
    train(config(tmp_path / "run", "evaluation.episodes=0", "run.steps=1"))
    assert "step 2 is done already, and run.steps is 1" in capsys.readouterr().out


def test_another_tokenizer_than_the_run_began_with_is_refused_unless_told(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", "run.steps=1", "evaluation.episodes=0"))
    file = run.model / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    more = config(tmp_path / "run", "run.steps=2", "evaluation.episodes=0")
    with pytest.raises(ConfigError, match=r"is not the one that .* began with"):
        train(more)
    train(more, allow_changes=True)
    train(more)


def test_a_model_that_is_not_there_is_named_without_asking_the_network(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model directory './nope' in .*; write a path, or a hub name"):
        train(config(tmp_path / "run", "model=./nope"))


class CutAfter(Screen):
    """Cancels the run once `step` steps are committed, as Ctrl-C would."""

    def __init__(self, config: Config, step: int) -> None:
        super().__init__(config)
        self.cut_after = step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        if step == self.cut_after:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()


async def cut_after(step: int, cut: Config) -> Run:
    with pytest.raises(asyncio.CancelledError):
        await trainer.train_async(cut, screen=CutAfter(cut, step))
    return Run(cut.run.dir)


def leases(run: Run) -> list[tuple[int, int, int]]:
    with closing(sqlite3.connect(run.journal)) as connection:
        return connection.execute("SELECT step, position, group_id FROM leases ORDER BY step, position").fetchall()


async def test_a_cut_run_goes_on_with_its_unfinished_episodes(tmp_path: Path) -> None:
    run = await cut_after(1, config(tmp_path / "run", "run.steps=50", "evaluation.episodes=0"))
    assert [step for step, _ in run.steps()] == [1]
    await trainer.train_async(config(tmp_path / "run", "run.steps=2", "evaluation.episodes=0"))
    result = audit(run.journal)
    assert (result.steps, result.lives, result.breaches) == (2, 2, ())
    with closing(sqlite3.connect(run.journal)) as connection:
        rows = connection.execute("SELECT data FROM events WHERE kind = 'sampled'").fetchall()
    versions = {span[1] for (data,) in rows for span in json.loads(data)[2]}
    # The second life counts from the step where the run is: a counter of its own would make every token older.
    assert min(version for version in versions if version >= 2_000_000) == 2_000_001


async def test_steps_that_no_checkpoint_covered_are_trained_again_on_the_same_groups(tmp_path: Path) -> None:
    rare = ("run.checkpoint_every=100", "evaluation.episodes=0")
    run = await cut_after(2, config(tmp_path / "run", "run.steps=50", *rare))
    before = [lease for lease in leases(run) if lease[0] <= 2]
    assert run.status().groups.get("consumed") is None
    await trainer.train_async(config(tmp_path / "run", "run.steps=2", *rare))
    assert [lease for lease in leases(run) if lease[0] <= 2] == before
    assert run.status().groups["consumed"] == 4
    assert audit(run.journal).breaches == ()


@pytest.mark.parametrize("call", [pytest.param(call, marks=pytest.mark.slow) for call in ("step", "save", "weights")])
async def test_a_killed_learner_ends_the_run_by_name_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It dies with a call of the trainer's in its hands, while episodes are being sampled."""
    calls: list[str] = []

    class Mortal(LearnerProcess):
        def _ask(self, function: Any, *arguments: Any, **how: Any) -> Any:
            calls.append(function.__name__)
            if calls.count(names[call]) == deaths[call]:
                os.kill(self.pid, signal.SIGSTOP)
                threading.Timer(0.2, os.kill, (self.pid, signal.SIGKILL)).start()
            return super()._ask(function, *arguments, **how)

    names = {"step": "step", "save": "save", "weights": "_hold"}
    deaths = {"step": 4, "save": 2, "weights": 5}  # of step 4: the last checkpoint is of step 2, or being made
    rare = ("rollout.mode=async", "run.steps=6", "run.checkpoint_every=2", "evaluation.episodes=0")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "LearnerProcess", Mortal)
        with pytest.raises(
            LearnerError, match=r"learner's process \(pid \d+\) ended with status -9.*same command again"
        ):
            await trainer.train_async(config(tmp_path / "run", *rare))
    run = Run(tmp_path / "run")
    leased = leases(run)
    # Weights are asked for once at the start, and after each commit.
    assert len(run.steps()) == {"step": 3, "save": 3, "weights": 4}[call]
    assert max(leased)[0] == 4
    await trainer.train_async(config(tmp_path / "run", *rare))
    assert leases(run)[: len(leased)] == leased
    assert [step for step, _ in run.steps()] == [1, 2, 3, 4, 5, 6]
    result = audit(run.journal)
    assert (result.breaches, result.lives) == ((), 2)
    assert run.status().groups["consumed"] == 12


@pytest.mark.parametrize("mode", ["sync", "carry_over", "async"])
def test_every_mode_trains_to_the_end_and_measures_one_frozen_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    measured: list[set[int]] = []

    async def watched(*args: Any, **options: Any) -> Any:
        evaluation = await evaluate_held_out(*args, **options)
        flat = [trajectory for several in evaluation.trajectories for trajectory in several]
        measured.append({s.weight_version for t in flat for s in t.segments if s.weight_version is not None})
        return evaluation

    monkeypatch.setattr(trainer, "evaluate_held_out", watched)
    run = train(config(tmp_path / "run", f"rollout.mode={mode}", "run.steps=3", "evaluation.every=1"))
    assert [step for step, _ in run.steps()] == [1, 2, 3]
    assert measured == [{1_000_000 + step} for step in range(4)]
    assert audit(run.journal).breaches == ()
    ages = [metrics["staleness/max"] for _, metrics in run.steps()]
    assert max(ages) == 0 if mode == "sync" else max(ages) <= 3


ROOT = Path(__file__).parents[1]


def signalled(directory: Path, number: str, phase: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tests.signalled", str(directory), number, phase, *overrides]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_in_any_phase_leaves_a_run_that_goes_on(tmp_path: Path, number: str) -> None:
    """In the cold start, while it restores, measures, waits for groups, learns, saves, and while it stops."""
    rare = ("run.steps=3", "evaluation.every=1")
    phases = ["cold start", "measuring", "waiting", "learning", "saving", "restoring", "stopping"]
    for mode in ("carry_over", "async"):
        for phase in phases:
            if phase == "restoring":
                train(config(tmp_path / mode, "run.steps=1", "evaluation.every=1", f"rollout.mode={mode}"))
            cut = signalled(tmp_path / mode, number, phase, *rare, f"rollout.mode={mode}")
            assert cut.returncode == CUT, (phase, cut.stderr)
            assert cut.stderr.splitlines()[-1] == "stopped; the same line goes on from here", phase
            status = Run(tmp_path / mode).status()
            assert status.owner.ended, phase  # so that another host need not wait for a sign of life
        run = train(config(tmp_path / mode, *rare, f"rollout.mode={mode}"))
        assert [step for step, _ in run.steps()] == [1, 2, 3]
        assert [step for step, _ in run.evaluations()] == [0, 1, 2, 3]
        assert audit(run.journal).breaches == ()
