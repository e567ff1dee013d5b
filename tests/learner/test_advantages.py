from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gspo_agent.learner.advantages import group_advantages
from gspo_agent.trajectory import is_flat
from tests.learner.oracles import CASES


def test_the_oracle_cases() -> None:
    for name in ("adv_zero_std", "adv_singleton"):
        assert group_advantages(CASES[name]["inputs"]["rewards"]).tolist() == CASES[name]["expected"]["advantages"]
    group = CASES["group4_population_std"]["inputs"]
    np.testing.assert_allclose(group_advantages(group["rewards"]), group["advantages"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("key", "eps"), [("eps0", 0.0), ("eps1e_6", 1e-6), ("eps1e_4", 1e-4)])
def test_eps_decides_whether_a_tiny_difference_is_signal(key: str, eps: float) -> None:
    case = CASES["adv_tiny_std_eps"]
    advantages = group_advantages(case["inputs"]["rewards"], eps=eps)
    np.testing.assert_allclose(advantages, case["expected"][key], rtol=0, atol=1e-9)


def test_rewards_equal_up_to_rounding_have_no_advantage() -> None:
    assert not group_advantages([0.1 + 0.2, 0.3, 0.3]).any()
    assert not group_advantages([1.0, 1.0, 1.0 + 1e-9]).any()
    assert group_advantages([0.0, 0.0, 1e-9]).any()  # small is not the same as equal


@given(st.floats(-1e3, 1e3), st.integers(2, 16), st.data())
def test_what_differs_by_rounding_alone_teaches_nothing_at_any_level_and_size(
    level: float, size: int, data: st.DataObject
) -> None:
    noise = data.draw(st.lists(st.floats(-1e-9, 1e-9), min_size=size, max_size=size))
    rewards = [level * (1 + part) for part in noise]
    assert not group_advantages(rewards).any()
    assert is_flat(rewards)
    rewards[0] += 1e-3 * max(1.0, abs(level))
    assert group_advantages(rewards).any()
    assert group_advantages(rewards).all()
    assert not is_flat(rewards)


rewards_near_each_other = st.builds(
    lambda level, steps, size: [level + size * step for step in steps],
    st.floats(-1e3, 1e3) | st.just(0.0),
    st.lists(st.floats(0, 1), max_size=9),
    st.integers(-16, 3).map(lambda exponent: 10.0**exponent),
)


@given(rewards_near_each_other)
@example([0.0, 1e-8])
@example([1.0, 1.0 + 5e-7])
@example([0.1 + 0.2 - 0.3, 0.0])
@example([0.7])
def test_a_group_that_is_left_out_as_flat_is_one_without_advantage(rewards: list[float]) -> None:
    assert is_flat(rewards) != group_advantages(rewards).any()


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=9))
def test_losers_count_as_winners_do(rewards: list[int]) -> None:
    advantages = group_advantages([float(reward) for reward in rewards])
    above = np.sign([len(rewards) * reward - sum(rewards) for reward in rewards])
    np.testing.assert_array_equal(np.sign(advantages), above)
    np.testing.assert_allclose(group_advantages([-float(reward) for reward in rewards]), -advantages)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_leaves_the_others_as_if_it_were_not_there(bad: float) -> None:
    advantages = group_advantages([1.0, bad, 0.0, 0.0])
    assert advantages[1] == 0.0
    np.testing.assert_array_equal(advantages[[0, 2, 3]], group_advantages([1.0, 0.0, 0.0]))
    assert group_advantages([bad, 0.7]).tolist() == [0.0, 0.0]
    assert group_advantages([bad, bad]).tolist() == [0.0, 0.0]


def test_sample_deviation_and_no_deviation() -> None:
    np.testing.assert_allclose(group_advantages([1.0, 0.0], ddof=1), [0.5**0.5, -(0.5**0.5)])
    np.testing.assert_allclose(group_advantages([3.0, 0.0, 0.0], std=False), [2.0, -1.0, -1.0])


@given(st.lists(st.floats(-10, 10), max_size=9))
def test_advantages_are_centred_finite_and_of_unit_deviation(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) < 1e-6
    assert not advantages.any() or abs(advantages.std() - 1) < 1e-6


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="ddof 2"):
        group_advantages([1.0], ddof=2)
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        group_advantages([[1.0], [0.0]])  # type: ignore[list-item]
