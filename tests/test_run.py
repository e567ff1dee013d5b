import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from gspo_agent.config import Config
from gspo_agent.errors import ConfigError, JournalError
from gspo_agent.rollout.journal import Journal
from gspo_agent.run import Run


def config(directory: Path) -> Config:
    return Config.parse({"model": "tiny", "env": [{"id": "a:B"}], "run": {"dir": str(directory)}})


def prepared(directory: Path) -> Run:
    run = Run.prepare(config(directory))
    run.record_config(config(directory))
    return run


def test_a_directory_without_a_configuration_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        Run.open(tmp_path)


def test_a_moved_run_keeps_its_configuration_but_for_its_place(tmp_path: Path) -> None:
    prepared(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert Run.open(tmp_path / "there").config().run.dir == tmp_path / "there"


def test_a_damaged_configuration_is_named_with_the_remedy(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    for damage in (
        b'{"config": {',
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"config": {"model": "x", "modle": 1}, "base_dir": "/"}',
    ):
        run.config_file.write_bytes(damage)
        with pytest.raises(JournalError, match=r"config.json cannot be read.*train THE_ORIGINAL.toml --allow-changes"):
            run.config()
        run.model.mkdir(exist_ok=True)
        with pytest.raises(JournalError, match="cannot be read"):
            Run.prepare(config(tmp_path / "run"))
    Run.prepare(config(tmp_path / "run"), allow_changes=True).record_config(config(tmp_path / "run"))
    assert run.config().model == "tiny"


def test_the_newest_evaluation_of_a_step_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    run.record_evaluation(0, {"pass_rate": 0.1})
    run.record_evaluation(0, {"pass_rate": 0.2})
    with run.held_out.open("a") as file:
        file.write('\n{"step": 5, "met\n[]\n12\n{}')
    run.record_evaluation(7, {"pass_rate": 0.5})
    assert run.evaluations() == [(0, {"pass_rate": 0.2}), (7, {"pass_rate": 0.5})]
    assert json.loads(run.held_out.read_text().splitlines()[-1])["step"] == 7


def test_checkpoints_without_their_journal_are_not_trained_over(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    (run.checkpoints / "step-2").mkdir(parents=True)
    with pytest.raises(JournalError, match=r"has checkpoints but no journal.sqlite, as if half of it had been copied"):
        prepared(tmp_path / "run")


def test_a_start_that_left_nothing_but_its_configuration_binds_nobody(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    Journal.open(run.journal).close()
    other = config(tmp_path / "run").override(["model=elsewhere/mended"])
    Run.prepare(other).record_config(other)
    assert run.config().model == "elsewhere/mended"


def test_a_refusal_names_only_what_differs(tmp_path: Path) -> None:
    prepared(tmp_path / "run").model.mkdir()
    with pytest.raises(ConfigError, match=r"\n  cold_start.steps: 1100 there, 7 here\n") as caught:
        Run.prepare(config(tmp_path / "run").override(["cold_start.steps=7"]))
    assert "hidden_size" not in str(caught.value)


@pytest.mark.parametrize("statement", [None, "PRAGMA user_version", "PRAGMA journal_mode = WAL"])
def test_a_start_that_was_killed_before_its_configuration_was_kept_is_gone_on_with(
    tmp_path: Path, statement: str | None
) -> None:
    run = Run.prepare(config(tmp_path / "run"))
    if statement is None:
        Journal.open(run.journal).close()
    else:  # killed while the journal was made: a file of no bytes, or without a table
        with contextlib.closing(sqlite3.connect(run.journal)) as connection:
            connection.execute(statement)
    (tmp_path / "run" / "live.json").write_text("{}")  # which is there as soon as the journal is
    Run.prepare(config(tmp_path / "run"))


def test_a_run_that_lost_its_configuration_goes_on_as_the_message_says(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    Journal.open(run.journal).close()
    run.model.mkdir()
    run.config_file.unlink()
    with pytest.raises(ConfigError, match=r"has a journal and no config.json.*--allow-changes"):
        Run.prepare(config(tmp_path / "run"))
    Run.prepare(config(tmp_path / "run"), allow_changes=True).record_config(config(tmp_path / "run"))
    assert run.config().model == "tiny"


def test_a_place_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/run cannot be written: Not a directory; see free space"):
        Run.prepare(config(tmp_path / "file" / "run"))
    run = prepared(tmp_path / "run")
    run.held_out.mkdir()
    with pytest.raises(JournalError, match=r"held_out.jsonl cannot be written: Is a directory"):
        run.record_evaluation(0, {})
