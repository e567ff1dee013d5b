import pytest

from gspo_agent.messages import assistant, call, tool_result, user
from gspo_agent.monitor.metrics import engine_use, staleness, summarise, tool_use
from gspo_agent.trajectory import Reward, Segment, Status, Trajectory


def episode(reward: float, *messages: object, status: Status = Status.TERMINATED) -> Trajectory:
    trajectory = Trajectory(0, 0, 0, seed=0, status=status)
    trajectory.messages = [user("q"), *messages]  # type: ignore[list-item]
    trajectory.rewards = [Reward(None, reward)]
    return trajectory


FAILED_CALL = (assistant("", [call("run")]), tool_result("timed out", outcome="timeout"))


def test_a_retry_is_a_call_in_the_turn_after_a_failed_one() -> None:
    assert tool_use(episode(1, *FAILED_CALL, *FAILED_CALL, assistant("4"))) == (2, 2, 1)
    assert tool_use(episode(1, assistant("", [call("run")]), tool_result("4"), assistant("4"))) == (1, 0, 0)


def test_a_failed_call_at_the_turn_limit_was_no_chance_to_retry() -> None:
    assert tool_use(episode(0, *FAILED_CALL, status=Status.TRUNCATED)) == (1, 0, 0)


def test_rates_count_scored_episodes_only_and_skip_empty_denominators() -> None:
    summary = summarise([episode(1, assistant("4")), episode(0), episode(0, status=Status.FAILED)], pass_threshold=1)
    assert summary["pass_rate"] == 0.5
    assert summary["tool_use"] == 0.0
    assert "retry_after_error" not in summary
    assert summarise([episode(0, status=Status.FAILED)], 1) == {}


def test_what_environments_count_is_added_up_and_their_other_numbers_are_means() -> None:
    episodes = [episode(1), episode(0), episode(0, status=Status.FAILED)]
    for number, one in enumerate(episodes):
        one.metrics = {"tested": float(number), f"count/verdict/{('equal', 'different', 'equal')[number]}": 1.0}
    summary = summarise([*episodes, *episodes[:1]], pass_threshold=1)
    assert {name: value for name, value in summary.items() if name.startswith(("env/", "count/"))} == {
        "env/tested": pytest.approx(1 / 3), "count/verdict/equal": 2.0, "count/verdict/different": 1.0,
    }  # fmt: skip


def test_staleness_is_weighted_by_tokens_in_steps_before_the_consuming_one() -> None:
    trajectory = Trajectory(0, 0, 0, seed=0)
    trajectory.append(Segment([1, 2, 3], "policy", [-1, -1, -1], 1_000_004))
    trajectory.append(Segment([4], "policy", [-1], 2_000_008))
    metrics = staleness([trajectory], step=9)
    assert metrics == {"staleness/mean": 3.0, "staleness/max": 4.0, "staleness/mixed_episodes": 1.0}


def test_what_an_engine_did_is_told_for_the_step_alone_with_the_share_it_had_not_to_compute_again() -> None:
    before = {"tokens": 100, "prefill_tokens": 1000, "cached_tokens": 50, "running": 3}
    after = {"tokens": 130, "prefill_tokens": 1010, "cached_tokens": 80, "running": 1}
    assert engine_use(before, after) == {
        "engine/tokens": 30.0, "engine/prefill_tokens": 10.0, "engine/cached_tokens": 30.0, "engine/cached_share": 0.75,
    }  # fmt: skip
    assert "engine/cached_share" not in engine_use(after, after)
