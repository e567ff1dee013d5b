from __future__ import annotations

import numpy as np
import pytest
import torch

from gspo_agent.learner.batch import Batch, make_batch
from gspo_agent.trajectory import Group, Reward, Segment, Trajectory, weight_version


def trajectory(index: int, segments: list[Segment], reward: float = 0.0) -> Trajectory:
    made = Trajectory(group_id=0, index=index, attempt=0, seed=index, rewards=[Reward(None, reward)])
    for segment in segments:
        made.append(segment)
    return made


def policy(ids: list[int], step: int = 4, turn: int = 0, life: int = 1) -> Segment:
    return Segment(ids, "policy", [-token / 100 for token in ids], weight_version(life, step), turn)


def two_turns(index: int = 0, reward: float = 0.0) -> Trajectory:
    return trajectory(index, [Segment([1, 2]), policy([10, 11]), Segment([3], turn=1), policy([12], turn=1)], reward)


def batch_of(*trajectories: Trajectory, max_weight_lag: int | None = 8, step: int = 5) -> Batch:
    group = Group(0, {}, list(trajectories))
    return make_batch([group], step=step, max_weight_lag=max_weight_lag, advantage_std=True)


def test_position_t_predicts_token_t_plus_one_and_everything_else_follows_the_predicted_token() -> None:
    batch = batch_of(two_turns())
    assert batch.inputs.tolist() == [[1, 2, 10, 11, 3]]
    assert batch.targets.tolist() == [[2, 10, 11, 3, 12]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True]]
    np.testing.assert_allclose(batch.rollout_logprobs, [[0, -0.10, -0.11, 0, -0.12]], rtol=1e-6)
    assert batch.weight_lags.tolist() == [[0, 1, 1, 0, 1]]
    assert batch.lengths.tolist() == [5]


def test_positions_after_the_last_trained_token_are_left_out() -> None:
    ended_by_tool = trajectory(0, [Segment([1]), policy([10]), Segment([2, 3])])
    expired_start = trajectory(1, [Segment([1]), policy([10], step=1), Segment([2]), policy([12])])
    expired_end = trajectory(2, [Segment([1]), policy([10]), Segment([2]), policy([12], step=1)])
    batch = batch_of(ended_by_tool, expired_start, expired_end, max_weight_lag=2)
    assert batch.lengths.tolist() == [1, 3, 1]
    assert batch.targets[batch.loss_mask].tolist() == [10, 12, 10]


def test_only_the_policys_own_tokens_are_trained() -> None:
    judge = Segment([20, 21], "judge", [-0.5, -0.5], weight_version(1, 4))
    batch = batch_of(trajectory(0, [Segment([1]), policy([10]), judge, policy([12])]))
    assert batch.targets[batch.loss_mask].tolist() == [10, 12]
    assert batch.rollout_logprobs[0, 1:3].tolist() == [0, 0]


def test_tokens_beyond_the_age_limit_leave_mask_and_logprobs_together() -> None:
    """A row of three versions: the age is counted in steps, whatever life sampled the token."""
    row = [Segment([1]), policy([10, 11], step=1), policy([12], step=3, life=2), policy([13], step=4, life=3)]
    for limit, kept in ((None, [10, 11, 12, 13]), (4, [10, 11, 12, 13]), (3, [12, 13]), (1, [13]), (0, [])):
        batch = batch_of(trajectory(0, row), max_weight_lag=limit)
        assert batch.targets[batch.loss_mask].tolist() == kept
        assert int((batch.rollout_logprobs != 0).sum()) == len(kept)
        assert batch.metrics["stale_tokens"] == 4 - len(kept)
        assert batch.weight_lags.tolist() == [[4, 4, 2, 1] if kept else []]


def test_empty_and_all_masked_trajectories_stay_rows() -> None:
    stale = trajectory(1, [Segment([1]), policy([10], step=1)])
    batch = batch_of(two_turns(reward=1.0), stale, trajectory(2, []), trajectory(3, [Segment([5])]), max_weight_lag=2)
    assert batch.num_trajectories == len(batch) == 4
    assert batch.lengths.tolist() == [5, 0, 0, 0]
    assert batch.loss_mask.sum(1).tolist() == [3, 0, 0, 0]
    assert batch.metrics["empty_rows"] == 3
    assert batch.advantages[0] > 0  # the empty ones were scored, so they count in the group


def test_advantages_are_relative_to_the_own_group() -> None:
    low = Group(0, {}, [two_turns(0, 0.0), two_turns(1, 1.0)])
    high = Group(1, {}, [two_turns(0, 5.0), two_turns(1, 5.0), two_turns(2, 5.0)])
    batch = make_batch([low, high], step=5, max_weight_lag=8, advantage_std=True)
    assert batch.advantages.tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0]
    assert batch.trajectory_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.metrics["groups_without_advantage"] == 1
    plain = make_batch([low], step=5, max_weight_lag=8, advantage_std=False)
    assert plain.advantages.tolist() == [-0.5, 0.5]


def test_choosing_rows_drops_the_padding_that_none_of_them_needs() -> None:
    batch = batch_of(two_turns(), trajectory(1, [Segment([1]), policy([10, 11])]), trajectory(2, []))
    part = batch.rows(torch.tensor([2, 1]))
    assert part.inputs.tolist() == [[0, 0], [1, 10]]
    assert part.trajectory_ids.tolist() == [2, 1]
    assert len(batch.rows(torch.tensor([], dtype=torch.int64))) == 0


def test_no_groups_make_an_empty_batch() -> None:
    batch = make_batch([], step=1, max_weight_lag=8, advantage_std=True)
    assert len(batch) == 0
    assert batch.num_trajectories == 0


def test_a_trajectory_that_begins_with_a_sampled_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0\.3\.0 begins with a sampled token"):
        batch_of(trajectory(3, [policy([10])]))
