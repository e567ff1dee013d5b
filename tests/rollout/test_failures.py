"""The window of failures: what is no fault of the policy is counted over restarts, and the run stops for too much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.config import RolloutConfig
from gspo_agent.errors import EngineError, EnvError
from gspo_agent.rollout import collector as module
from gspo_agent.rollout.failures import WINDOW, Failures
from tests.rollout.scene import Run, Shop, play_to_the_end, until


def test_only_the_last_episodes_count_and_the_first_cause_among_them_is_told() -> None:
    failures = Failures(0.5)
    for _ in range(WINDOW // 2):
        assert failures.add("EngineError: gone") is None
    fault = failures.add("KeyError: other")
    assert isinstance(fault, EngineError)
    assert "101 of the last 101" in str(fault)
    assert "EngineError: gone" in str(fault)
    for _ in range(WINDOW):
        assert failures.add(None) is None
    assert failures.add("KeyError: other") is None
    assert failures.causes == {"EngineError: gone": 100, "KeyError: other": 2}


def test_what_earlier_lives_saw_counts_and_is_not_told_as_of_this_one() -> None:
    failures = Failures(0.5, ["KeyError: odd"] * (WINDOW // 2) + [None])
    assert not failures.causes
    assert isinstance(failures.add("ValueError: x"), EnvError)


class Dead(Shop):
    def setup(self, task: dict[str, Any]) -> None:
        raise KeyError("no such table")


async def test_failures_add_up_over_restarts_and_begin_anew_once_the_run_has_stopped_for_them(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixteen members each fails once a life, then waits: no life fails often enough by itself."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_BACK_OFF", 3600.0)
    path, config = fast_path / "journal.sqlite", RolloutConfig(group_size=8, groups_per_step=1, max_failed=0.2)
    for life in range(2):
        with Run(path, Dead, config) as run:
            assert len(run.ledger.recent_causes(WINDOW)) == 16 * life
            await run.collector.start(0)
            await until(lambda run=run, life=life: run.ledger.status().slots.get("failed") == 16 * (life + 1))
            await run.collector.stop()
    with Run(path, Dead, config) as run:
        await run.collector.start(0)
        with pytest.raises(EnvError, match=r"41 of the last 41 episodes failed.*no such table"):
            async with asyncio.timeout(20):
                await run.collector.lease(1, step=1)
        await run.collector.stop()
    with Run(path, Shop, config) as run:  # whoever starts it again has mended the environment
        assert run.ledger.recent_causes(WINDOW) == []
        assert await play_to_the_end(run)
        assert set(run.ledger.recent_causes(WINDOW)) == {None}


async def test_a_failed_member_waits_longer_each_time_and_a_stop_ends_the_waiting(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_BACK_OFF", 3600.0)
    config = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0)
    with Run(fast_path / "journal.sqlite", Dead, config) as run:
        await run.collector.start(0)
        await until(lambda: run.ledger.status().slots.get("failed") == 2)
        await asyncio.sleep(0.01)
        assert run.ledger.status().slots == {"failed": 2, "waiting": 2}
        monkeypatch.setattr(module, "_CUT_SECONDS", 3600.0)  # who waits would be waited for
        async with asyncio.timeout(10):
            await run.collector.stop()
        assert not run.collector._tasks
