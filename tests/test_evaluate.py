from itertools import combinations

import pytest

from gspo_agent.evaluate import Evaluation, pass_at_k, to_json
from gspo_agent.trajectory import Reward, Segment, Status, Trajectory


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
