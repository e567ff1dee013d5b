import numpy as np
import pytest

from gspo_agent.trajectory import Segment, Trajectory, version_step, weight_version


def sampled(ids: list[int], version: int = 1_000_000, turn: int = 0) -> Segment:
    return Segment(ids, author="policy", logprobs=[-0.5] * len(ids), weight_version=version, turn=turn)


def test_versions_of_different_lives_differ_and_keep_their_step() -> None:
    assert weight_version(1, 5) != weight_version(2, 5)
    assert version_step(weight_version(7, 12)) == 12
    with pytest.raises(ValueError, match="step below"):
        weight_version(1, 1_000_000)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"author": "policy"}, "needs logprobs"),
        ({"author": "policy", "logprobs": [-0.1]}, "needs logprobs and a weight version"),
        ({"author": "policy", "logprobs": [-0.1], "weight_version": 1}, "2 token ids but 1 logprobs"),
        ({"author": "policy", "logprobs": [-0.1, float("nan")], "weight_version": 1}, "not finite"),
        ({"logprobs": [-0.1, -0.2]}, "neither logprobs nor a weight version"),
        ({"extras": {"experts": np.zeros((3, 2))}}, "2 token ids but 3 rows of 'experts'"),
    ],
)
def test_an_inconsistent_segment_cannot_be_made(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment([1, 2], **kwargs)  # type: ignore[arg-type]


def test_a_segment_moved_to_a_turn_is_the_same_in_all_else() -> None:
    segment = Segment([5, 6], "policy", [-0.1, -2.0], 1000003, 0, {"entropy": np.array([1.0, 2.0])})
    moved = segment.of_turn(2)
    assert (moved.turn, segment.turn) == (2, 0)
    assert all(getattr(moved, name) is getattr(segment, name) for name in Segment.__slots__ if name != "turn")
    assert moved.of_turn(2) is moved


def test_segments_are_joined_whole_and_only_where_one_continues_the_other() -> None:
    first = Segment([5, 6], "policy", [-0.1, -2.0], 1000003, 1, {"entropy": np.array([1.0, 2.0])})
    both = first.join(Segment([7], "policy", [-0.5], 1000003, 1, {"entropy": np.array([3.0])}))
    assert (both.token_ids.tolist(), both.author, both.weight_version, both.turn) == ([5, 6, 7], "policy", 1000003, 1)
    assert both.logprobs is not None
    assert both.logprobs.tolist() == np.array([-0.1, -2.0, -0.5], np.float32).tolist()
    assert both.extras["entropy"].tolist() == [1.0, 2.0, 3.0]
    assert (both.token_ids.dtype, both.logprobs.dtype) == (np.int32, np.float32)
    for other in (Segment([7], turn=1), sampled([7], version=1000004, turn=1), sampled([7], version=1000003)):
        with pytest.raises(ValueError, match="does not continue"):
            first.join(other)


def test_adjacent_segments_that_agree_are_merged_and_others_are_not() -> None:
    trajectory = Trajectory(0, 0, 0, seed=1)
    for segment in (
        Segment([1, 2]),
        sampled([3]),
        sampled([4]),
        sampled([5], version=1_000_001),
        Segment([], turn=0),
        Segment([6], turn=1),
        sampled([7], version=1_000_001, turn=1),
    ):
        trajectory.append(segment)
    assert [s.token_ids.tolist() for s in trajectory.segments] == [[1, 2], [3, 4], [5], [6], [7]]


def test_a_row_is_derived_from_the_segments() -> None:
    trajectory = Trajectory(0, 0, 0, seed=1)
    trajectory.append(Segment([1, 2]))
    trajectory.append(sampled([3, 4], version=2_000_003))
    trajectory.append(Segment([5], turn=1))
    (row,) = trajectory.rows()
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.sampled.tolist() == [False, False, True, True, False]
    assert row.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, 0]
    assert row.weight_versions.tolist() == [-1, -1, 2_000_003, 2_000_003, -1]
    assert row.turns.tolist() == [0, 0, 0, 0, 1]
    assert trajectory.num_sampled == 2
    assert Trajectory(0, 0, 0, seed=1).rows() == []
