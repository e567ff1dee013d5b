"""`gspo-agent judge`, run as a person runs it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_agent import entry_points
from gspo_agent.errors import ConfigError, TaskError
from rewards import judging

ROOT = Path(__file__).parents[2]
ECHO = {"id": "echo", "solution": "print(input())", "tests": [{"stdin": "7", "stdout": "7"}]}
WRONG = {"id": "wrong", "solution": "print(0)", "tests": [{"stdin": "7", "stdout": "HIDDEN"}]}
CALL = {"solution": "def add(a, b): return a - b", "entry_point": "add", "tests": [{"args": [7, 1], "expected": 99881}]}
FILE = {"id": "file", "solution": "def f(): return 1", "tests": "import solution\ndef test(): assert solution.f() == 1"}
COMMAND = [sys.executable, "-m", "gspo_agent.cli", "judge"]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def lines(text: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, text.splitlines())}


def test_bad_rows_are_named_by_line_and_the_others_are_judged(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl", ECHO, "{", WRONG, {"solution": "x"}, CALL, FILE, {**FILE, "id": "two", "count": "two"}
    )
    finished = subprocess.run([*COMMAND, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    found = lines(finished.stdout)
    verdicts = {id: row["verdict"] for id, row in found.items()}
    assert verdicts.pop(f"{file}:5") == "wrong_answer"
    # A count that is none is a fault of the task: judged, and never a score.
    assert verdicts == {"echo": "pass", "wrong": "wrong_answer", "file": "pass", "two": "task_error"}
    assert set(found["echo"]) == {"id", "verdict", "passed", "total", "reason", "ms"}
    assert found["wrong"]["reason"] == "0 of 1 tests passed; test 1: wrong answer: the output differs at token 1"
    assert "HIDDEN" not in finished.stdout + finished.stderr
    assert "99881" not in finished.stdout + finished.stderr
    assert f"{file}:2: row: is not JSON" in finished.stderr
    assert f"{file}:4: tests: is neither" in finished.stderr
    assert finished.stderr.splitlines()[-1].startswith("5 judged, ")
    assert finished.stderr.splitlines()[-1].endswith("rows that cannot be used 2")
    assert finished.returncode == 1


def test_ctrl_c_leaves_what_was_printed(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ECHO, {**ECHO, "id": "asleep", "solution": "import time; time.sleep(60)"})
    with subprocess.Popen([*COMMAND, str(file)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as judge:
        assert judge.stdout is not None
        assert json.loads(judge.stdout.readline())["verdict"] == "pass"
        os.kill(judge.pid, signal.SIGINT)
        out, error = judge.communicate(timeout=20)
    assert (judge.returncode, out) == (130, b"")
    assert b"stopped; what was judged is printed" in error


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**ECHO, "kind": ["stdio"]}, "unknown kind of test ['stdio']"),
        ({**ECHO, "kind": "haskell"}, "unknown kind of test 'haskell'; known are stdio, call, testfile"),
        ({**CALL, "entry_point": 3}, "entry_point: is int, not a name"),
        ({**CALL, "cls": ["A"]}, "cls: is list, not a name"),
        ({**CALL, "compare": "tokens"}, "comparison 'tokens' is not for tests of kind 'call'"),
        ({**ECHO, "time_limit": float("inf")}, "time_limit: is inf, not CPU seconds"),
        ({**ECHO, "time_limit": "1"}, "time_limit: is '1', not CPU seconds"),
        ({**ECHO, "solution": 7}, "solution: is int, not text"),
        ({**ECHO, "tests": ["7"]}, "tests: is neither a list of objects"),
        ([], "row: is list, not an object"),
    ],
)  # fmt: skip
async def test_row_that_cannot_be_used_is_named_with_its_field(
    row: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await judging.judge_file(write(tmp_path / "rows.jsonl", row)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"rows.jsonl:1: {said}" in captured.err


async def test_odd_texts_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = {**ECHO, "id": None, "tests": [{"stdin": "\ud800", "stdout": "7"}]}
    code = {**ECHO, "id": "code", "solution": "print('\ud800')\0"}
    file = write(tmp_path / "rows.jsonl", half, code, {**ECHO, "id": ["a"], "tests": []})
    assert await judging.judge_file(file) == 0
    found = {id: row["verdict"] for id, row in lines(capsys.readouterr().out).items()}
    assert found == {f"{file}:1": "task_error", "code": "compile_error", "['a']": "task_error"}


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
async def test_file_without_rows_is_an_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / ("rows.json" if content == "[]" else "rows.jsonl")
    file.write_text(content)
    with pytest.raises(TaskError, match=r"rows\.jsonl?: holds no rows"):
        await judging.judge_file(file)


def test_verdicts_come_before_the_file_ends_and_a_closed_pipe_ends_the_rest_in_silence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    line = [*COMMAND, str(tmp_path / "rows.jsonl")]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as judge:
        assert judge.stdout is not None
        with (tmp_path / "rows.jsonl").open("w", buffering=1) as rows:
            rows.write(json.dumps(ECHO) + "\n")
            assert json.loads(judge.stdout.readline())["verdict"] == "pass"
            judge.stdout.close()
            rows.write(json.dumps(ECHO) + "\n")
        assert judge.stderr is not None
        assert judge.stderr.read() == ""
        assert judge.wait(20) == 1


def test_file_that_ends_too_early_is_one_line_after_what_was_judged(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.jsonl.gz", json.dumps(ECHO).encode() + b"\n"
    file.write_bytes(gzip.compress(row) + gzip.compress(row)[:-9])
    finished = subprocess.run([*COMMAND, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"TaskError: {file}: cannot be read: ")
    assert len(finished.stderr.splitlines()) == 1


def test_standard_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ECHO)
    with open("/dev/full", "w") as full:
        finished = subprocess.run(
            [*COMMAND, str(file)], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert finished.returncode == 1
    assert finished.stderr == "GspoAgentError: standard output cannot be written: No space left on device\n"


async def test_cases_in_one_json_file_are_judged_and_their_texts_generated_inside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generated = {**ECHO, "id": "made", "tests": [{"stdin": "GEN:'1' * 3", "stdout": "GEN:str(111)"}]}
    nosy = {**ECHO, "id": "nosy", "tests": [{"stdin": f"GEN:open({str(ROOT / 'README.md')!r}).read()", "stdout": ""}]}
    file = write(tmp_path / "cases.json", {"cases": [generated, nosy, {"kind": "session", "id": "cells"}]})
    assert await judging.judge_file(file) == 2
    said = capsys.readouterr()
    assert lines(said.out)["made"]["verdict"] == "pass"
    assert f"{file}[1]: GEN:open(" in said.err
    assert f"{file}[2]: kind: is 'session'" in said.err


def test_judge_that_is_not_installed_is_named_with_the_remedy() -> None:
    assert entry_points.load_judge("unit_tests") is judging.judge_file
    with pytest.raises(ConfigError, match=r"no judge 'taste' in the entry points gspo_agent\.judges; install"):
        entry_points.load_judge("taste")
