import asyncio
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.config import Config, EnvConfig, Limits
from gspo_agent.env import EnvFactory
from gspo_agent.errors import ConfigError, JournalError
from gspo_agent.evaluate import Evaluation, evaluate, pass_at_k, policy_path, to_json
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout.collector import Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.run import Run
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import Reward, Segment, Status, Trajectory
from tests.rollout.scene import CHAT, Shop, Tasks, shopper, until


def episode(reward: float) -> Trajectory:
    trajectory = Trajectory(-1, 0, 0, seed=0, status=Status.TERMINATED, rewards=[Reward(None, reward)])
    trajectory.append(Segment([1, 2]))
    trajectory.append(Segment([3], "policy", [-0.5], 1_000_000))
    return trajectory


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 0, 2), (4, 1, 2), (4, 2, 3), (4, 4, 1), (5, 2, 2)])
def test_pass_at_k_is_the_share_of_draws_with_a_success(samples: int, passed: int, k: int) -> None:
    draws = list(combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_rates_are_over_tasks_and_failures_are_in_none() -> None:
    metrics = Evaluation([[episode(1), episode(0)], [episode(0), episode(0)]], ["EnvError: x"]).metrics(1.0)
    assert metrics["pass_rate"] == 0.25
    assert metrics["pass@2"] == 0.5
    assert metrics["pass_rate/standard_error"] == pytest.approx(0.25)
    assert metrics["failed_episodes"] == 1
    assert Evaluation([[]], ["EnvError: x"]).metrics(1.0) == {"episodes": 0.0, "failed_episodes": 1.0}


def test_an_episode_as_json_says_who_wrote_each_token() -> None:
    record = to_json(episode(1))
    assert record["sampled"].tolist() == [False, False, True]
    assert record["weight_versions"].tolist() == [-1, -1, 1_000_000]
    assert record["reward"] == 1.0


def test_a_policy_that_is_gone_is_named(tmp_path: Path) -> None:
    config = Config.parse({"model": "tiny", "env": [{"id": "a:B"}], "run": {"dir": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match="no model directory 'nope'"):
        policy_path(config, [], None, Path("nope"), Screen(config))
    run = Run.prepare(config)
    with Journal.open(run.journal) as journal:
        journal.submit(
            lambda c: c.execute("INSERT INTO steps VALUES (1, 1, 0, 'step-1', 'abc', '{}')"), full=True
        ).result()
    with pytest.raises(JournalError, match="step-1 does not exist, but the journal names it; give --model DIRECTORY"):
        policy_path(config, [], run, None, Screen(config))


async def test_a_cut_evaluation_waits_no_longer_than_a_moment_for_environments_that_do_not_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is cut has the episodes of training to write down."""
    monkeypatch.setattr("gspo_agent.evaluate._CLOSE_SECONDS", 3600.0)
    inside: list[str] = []

    class Hanging(Shop):
        async def setup(self, task: dict[str, Any]) -> None:
            inside.append(self.episode_id)
            await asyncio.sleep(3600)

        async def aclose(self) -> None:
            await asyncio.sleep(3600)

    source = Source(EnvFactory(EnvConfig(id="shop"), Hanging), Tasks(), Limits())  # type: ignore[arg-type]
    measuring = asyncio.create_task(evaluate([source], chat=CHAT, engine=ScriptedEngine(shopper), episodes=4))
    await until(lambda: len(inside) == 4)
    measuring.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await measuring
