import json
from pathlib import Path

import pytest

from gspo_agent.config import Config
from gspo_agent.errors import ConfigError, JournalError
from gspo_agent.run import Run


def config(directory: Path) -> Config:
    return Config.parse({"model": "tiny", "env": [{"id": "a:B"}], "run": {"dir": str(directory)}})


def test_a_directory_without_a_configuration_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        Run.open(tmp_path)


def test_a_moved_run_keeps_its_configuration_but_for_its_place(tmp_path: Path) -> None:
    Run.prepare(config(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    assert Run.open(tmp_path / "there").config().run.dir == tmp_path / "there"


def test_a_damaged_configuration_is_named_with_the_remedy(tmp_path: Path) -> None:
    run = Run.prepare(config(tmp_path / "run"))
    run.config_file.write_text('{"config": {')
    with pytest.raises(JournalError, match=r"config.json is damaged.*start with the original TOML file"):
        run.config()


def test_the_newest_evaluation_of_a_step_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    run = Run.prepare(config(tmp_path / "run"))
    run.record_evaluation(0, {"pass_rate": 0.1})
    run.record_evaluation(0, {"pass_rate": 0.2})
    with run.held_out.open("a") as file:
        file.write('\n{"step": 5, "met')
    run.record_evaluation(7, {"pass_rate": 0.5})
    assert run.evaluations() == [(0, {"pass_rate": 0.2}), (7, {"pass_rate": 0.5})]
    assert json.loads(run.held_out.read_text().splitlines()[-1])["step"] == 7
