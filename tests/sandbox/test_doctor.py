from __future__ import annotations

from pathlib import Path

import pytest

from gspo_agent.sandbox import SandboxSettings
from gspo_agent.sandbox.doctor import Diagnosis, examine
from tests.sandbox import confinement


def diagnosis(kind: str, directory: Path) -> Diagnosis:
    python = confinement.wrapped(kind, directory)
    if python is None:
        pytest.skip(f"no interpreter for {kind}")
    return examine(SandboxSettings(python=python))


def test_strongest_backend_that_holds_is_named() -> None:
    found = examine(SandboxSettings())
    assert found.chosen == "ns"
    assert "self-test: every attempt to get out failed" in str(found)
    assert str(found).endswith("code runs in: ns")


def test_container_is_told_what_it_gets_what_it_lacks_and_how_to_get_more(tmp_path: Path) -> None:
    found = diagnosis("docker", tmp_path)
    assert found.chosen == "landlock"
    said = str(found)
    assert "not here: [Errno 1] unshare" in said
    assert "--security-opt seccomp=PROFILE" in said
    assert "jobs have user ids of their own" in said
    assert "subprocesses: fork and exec are refused" in said


def test_machine_without_isolation_is_told_so(tmp_path: Path) -> None:
    found = diagnosis("old", tmp_path)
    assert found.chosen is None
    assert str(found).endswith("no code is run on this machine: nothing isolates it")


def test_unsafe_is_never_called_tested() -> None:
    assert "nothing is tested" in str(examine(SandboxSettings("unsafe")))
