"""The command line, run as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gspo_agent import cli, interruption
from gspo_agent.errors import ConfigError
from gspo_agent.run import Run
from gspo_agent.trainer import train
from tests.sandbox import confinement
from tests.test_trainer import Parrot, cache, config  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gspo_agent.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_an_unknown_key_is_one_line_before_anything_is_loaded() -> None:
    finished = run("train", "examples/math.toml", "rollout.group_sze=4")
    assert finished.returncode == 1
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.endswith("unknown key rollout.group_sze; did you mean 'group_size'?")


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "resume",
        "status",
        "eval",
        "rollout",
        "check",
        "init-env",
        "init-model",
        "audit",
        "export",
        "serve",
        "judge",
        "verify",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_check_names_each_breach_and_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["check", "tests.test_trainer:Broken"])
    assert result.exit_code == 1
    assert "breaches" in result.output


def test_check_is_content_with_the_calculator() -> None:
    result = CliRunner().invoke(cli.app, ["check", "gspo_agent/Calculator-v0"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("arguments", [[], ["gspo_agent/Calculator-v0", "--tasks", "tasks.jsonl"]])
def test_check_wants_an_environment_or_tasks(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["check", *arguments])
    assert str(result.exception) == "give one environment to check, or --tasks FILE"


def test_init_env_writes_an_environment_and_its_test(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["init-env", "web shop", "--directory", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_web_shop.py", "web_shop.py"]
    assert "gspo-agent check web_shop:WebShop" in result.output


def test_status_audit_eval_and_rollout_read_a_run(tmp_path: Path) -> None:
    made = train(config(tmp_path / "run", "run.steps=1", "evaluation.episodes=2"))
    runner = CliRunner()
    said = " ".join(runner.invoke(cli.app, ["status", str(made.dir)]).output.split())
    assert "not running, life 1, step 1 (checkpoint step-1)" in said
    assert "a restart now would lose: 0 tokens" in said
    status = json.loads(runner.invoke(cli.app, ["status", str(made.dir), "--json"]).output)
    assert status["step"] == 1
    assert "no task lost" in runner.invoke(cli.app, ["audit", str(made.dir)]).output
    exported = runner.invoke(cli.app, ["export", str(made.dir), str(tmp_path / "parquet")]).output
    assert exported.startswith(f"{made.status().slots['done']} episodes in 2 files")
    assert (tmp_path / "parquet" / "step-000001.parquet").exists()
    out = tmp_path / "episodes.jsonl"
    for arguments in (
        ["eval", str(made.dir), "--samples", "2"],
        ["rollout", str(made.dir), str(out), "--episodes", "3"],
    ):
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 3
    assert json.loads(out.read_text().splitlines()[0])["messages"][0]["role"] in ("system", "user")


class Moody(Parrot):
    """Every second task cannot be asked."""

    def prompt(self, task: dict[str, Any]) -> str:
        if int(task["word"].removeprefix("train")) % 2:
            raise KeyError("odd")
        return super().prompt(task)


def test_episodes_that_failed_are_said_when_the_others_are_written(tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    run_dir = Run.prepare(made := config(tmp_path / "run", "env.0.id=tests.test_cli:Moody"))
    run_dir.record_config(made)
    result = CliRunner().invoke(cli.app, ["rollout", str(run_dir.dir), str(out), "--episodes", "12"])
    assert result.exit_code == 0, result.output
    written = len(out.read_text().splitlines())
    assert 0 < written < 12
    assert f"{written} episodes in {out}; {12 - written} failed and are not in it, the first with" in result.output
    assert "KeyError: 'odd'" in result.output


def test_a_model_is_only_made_where_the_configuration_says_tiny(tmp_path: Path) -> None:
    toml = tmp_path / "x.toml"
    toml.write_text('model = "Qwen/Qwen3-4B"\n[[env]]\nid = "gspo_agent/Calculator-v0"\n[run]\ndir = "x"\n')
    result = CliRunner().invoke(cli.app, ["init-model", str(toml)])
    assert isinstance(result.exception, ConfigError)


def test_a_model_is_copied_over_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["init-model", str(ROOT / "examples/math.toml"), "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "exists" in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "run.dir={}/run"], "stopped; the same line goes on from here"),
        (["eval"], "stopped; nothing was kept, the same line begins again"),
        (["rollout", "{}/out.jsonl"], "stopped; nothing was kept, the same line begins again"),
    ],
)
def test_ctrl_c_in_the_cold_start_is_heard_and_promises_what_is_true(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    command, *rest = (argument.format(tmp_path) for argument in arguments)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    line = [sys.executable, "-u", "-m", "gspo_agent.cli", command, "examples/math.toml", *rest]
    with subprocess.Popen(line, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "cold start" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == interruption.CUT
        assert process.stderr.read().splitlines() == [said]


@pytest.mark.parametrize(("kind", "status"), [("docker", 0), ("old", 1)])
def test_doctors_exit_status_says_whether_code_can_be_isolated(kind: str, status: int, tmp_path: Path) -> None:
    python = confinement.wrapped(kind, tmp_path)
    if python is None:
        pytest.skip(f"no interpreter for {kind}")
    finished = run("doctor", "examples/math.toml", f"sandbox.python={python}")
    assert finished.returncode == status, finished.stderr
    assert finished.stdout.startswith("ns: ")
