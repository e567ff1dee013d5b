"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

from gspo_agent.env.shared import _direct
from gspo_agent.env.threads import run_sync
from gspo_agent.sandbox import shared_sandbox
from gspo_agent.sandbox.inside import linux
from tests.faults.zygote import Zygote
from tests.sandbox import survivors

# An example may take long on a busy machine, which says nothing about what is tested.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every process, mount and temporary file that a test has made is gone after the last one.

    Whatever outlives its parent becomes a child of this process, so that it stays in sight; temporary files that are
    not a test's own `tmp_path` all go into one directory.
    """
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    before, mounts = survivors.descendants(os.getpid()), survivors.traces().mounts
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="gspo-tests-") as directory:
        Path(directory).chmod(0o1777)
        patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield
        shared_sandbox().close_now()
        for shared in list(_direct.values()):
            run_sync(shared.close())
        left = survivors.alive(survivors.descendants(os.getpid()) - before - {resource_tracker._resource_tracker._pid})
        named = [f"{pid}: {_command(pid)}" for pid in sorted(left)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not named, "processes are left"
        assert not os.listdir(directory), "temporary files are left"
    assert survivors.traces().mounts == mounts


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks lives of a run; for all tests that kill some."""
    with Zygote(["tests.faults.victim"]) as zygote:
        yield zygote
