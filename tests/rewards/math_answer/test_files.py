"""`gspo-agent verify`, run as a person runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_agent import entry_points
from rewards.math_answer import files

ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests" / "cases" / "math.json"


COMMAND = [sys.executable, "-m", "gspo_agent.cli", "verify"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_one_text_is_verified_and_says_why() -> None:
    finished = run("--gold", "0.5", "--text", r"so \boxed{\frac{1}{2}}")
    (line,) = map(json.loads, finished.stdout.splitlines())
    assert set(line) == {"id", "correct", "reason", "extracted", "path", "ms"}
    assert (line["correct"], line["reason"], line["extracted"]) == (True, "equal:num", r"\frac{1}{2}")
    assert (finished.stderr.strip(), finished.returncode) == ("1 verified, equal:num 1", 0)
    assert "give --jsonl FILE" in run().stderr


async def test_rows_that_cannot_be_used_are_named_and_the_others_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [
        {"id": "right", "text": r"\boxed{7}", "gold": "7"},
        {"text": r"\boxed{7}", "gold": "8"},
        {"text": r"\boxed{0.33}", "gold": "1/3", "rel_tol": 0.1},
        {"text": r"\boxed{C}", "gold": "C", "opts": {"answer_type": "choice", "colour": 1}},
        {"text": r"\boxed{C}", "gold": "C", "rel_tol": "much"},
        {"text_parts": [[r"\boxed{7", 1], ["0", 2], ["}", 1]], "gold": "700"},
        {"text": r"\boxed{7}", "gold": ""},
        {"gold": "7"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n{")
    assert await files.verify_file(file) == 5
    said = capsys.readouterr()
    found = [json.loads(line) for line in said.out.splitlines()]
    assert [line["correct"] for line in found] == [True, False, True, True, False]
    assert (found[0]["id"], found[1]["id"]) == ("right", f"{file}:2")
    assert found[-1]["reason"] == "gold_invalid"
    problems = ":4: opts: unknown option 'colour'", ":5: row: rel_tol is 'much'", ":8: text: is missing", ":9: row:"
    for problem in problems:
        assert f"{file}{problem}" in said.err
    assert said.err.splitlines()[-1].startswith("5 verified, ")


async def test_rows_come_from_standard_input_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": None, "text": r"\boxed{7}", "gold": 7}, {"text": r"\boxed{7}", "gold": 7.5}]
    (tmp_path / "stdin").write_text("\n".join(map(json.dumps, rows)))
    with (tmp_path / "stdin").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert await files.verify_file(Path("-")) == 1
    said = capsys.readouterr()
    (line,) = map(json.loads, said.out.splitlines())
    assert (line["id"], line["correct"]) == ("standard input:1", True)
    assert said.err.startswith("standard input:2: gold: is float, not text\n")


def many(tmp_path: Path) -> str:
    rows = [json.dumps({"text": rf"\boxed{{{n}}}", "gold": str(n)}) for n in range(100_000)]
    (tmp_path / "many.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "many.jsonl")


@pytest.mark.slow
def test_whoever_has_read_enough_may_close_the_pipe(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, "--jsonl", many(tmp_path)], cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["correct"]
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_ctrl_c_stops_at_once_and_what_was_verified_is_printed(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, "--jsonl", many(tmp_path)], cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "stopped; what was verified is printed\n")
    out = first + rest
    assert out.endswith("}\n")
    assert all(json.loads(line)["correct"] for line in out.splitlines())


@pytest.mark.slow
def test_the_whole_corpus_is_verified_by_the_command() -> None:
    finished = run("--jsonl", str(CASES))
    verdicts = {line["id"]: line["correct"] for line in map(json.loads, finished.stdout.splitlines())}
    assert verdicts == {case["id"]: case["expected"] for case in json.loads(CASES.read_text())["cases"]}
    assert finished.stderr.splitlines()[-1].startswith("470 verified, ")


def test_it_is_found_by_its_entry_point() -> None:
    assert entry_points.load_judge("math") is files.verify_file
