"""Episodes of the code sandbox, many at once: `python -m tests.benchmarks.sandbox_episodes` plays more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import sandbox_episodes


@pytest.mark.slow
async def test_many_episodes_at_once_have_no_wrong_verdict_and_leave_nothing(tmp_path: Path) -> None:
    outcome = await sandbox_episodes.play(30, tmp_path)
    assert outcome.wrong == []
    assert outcome.verdicts.total() == 30
    assert set(outcome.verdicts) == set(sandbox_episodes.PROGRAMS)
    assert not outcome.left
    assert 0 < outcome.jobs <= 2 * sandbox_episodes.AT_ONCE
    assert outcome.session_cpu < 0.05
    assert outcome.session_memory < 6  # MiB; 4 is what the benchmark of the sandbox aims at
