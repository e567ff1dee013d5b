"""The direction of imports is the architecture; import-linter's contracts in pyproject.toml hold it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_rooms_are_entered_in_one_direction() -> None:
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "misc", "common", "helpers", "helper"}
    found = [p for room in ("gspo_agent", "envs", "rewards") for p in (ROOT / room).rglob("*.py") if p.stem in vague]
    assert found == []


def test_rollout_runs_without_torch() -> None:
    code = "import sys, gspo_agent.rollout.collector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
