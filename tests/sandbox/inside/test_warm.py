from __future__ import annotations

import shutil
import subprocess

import pytest

from gspo_agent.sandbox import Sandbox, SandboxSettings
from gspo_agent.sandbox.inside import warm


def test_module_that_this_version_of_python_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_MODULES", "_no_such_module math")
    warm.import_all()


async def test_no_module_is_loaded_that_does_something_after_every_fork() -> None:
    async with Sandbox() as own:
        result = await own.run("import sys\nprint({'threading', 'random', 'logging'} & set(sys.modules))")
        assert result.stdout == b"set()\n"


def installed(name: str) -> str:
    asked = [shutil.which(name) or name, "-c", "import sys; print(sys.executable)"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no {name}")


@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13", "python3.14"])
async def test_jobs_run_in_every_installed_version(name: str) -> None:
    python = installed(name)
    async with Sandbox(SandboxSettings(python=python)) as own:
        result = await own.run("import sys, random, decimal, dataclasses\nprint('python%d.%d' % sys.version_info[:2])")
        assert result.stdout.decode() == f"{name}\n", result.stderr
