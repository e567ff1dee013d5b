"""What the long-tail simulation has to show at any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.long_tail import MODES, Scale, simulate

TINY = Scale(
    slots=4, groups=2, size=2, steps=4, warm_up=2, mean=200, most=2000, learner_seconds=1.0, over_provision=3.0,
    journal_tokens=64, seed=3,
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_beats_the_bound_and_only_discard_throws_tokens_away(mode: str, tmp_path: Path) -> None:
    outcome = simulate(mode, TINY, tmp_path / mode)
    assert outcome.seconds >= outcome.bound * (1 - 1e-9)
    assert (outcome.thrown_away > 0) is (mode == "discard")
    assert (max(outcome.staleness) > 1) is (mode in ("carry_over", "async"))
    assert outcome.utilisation <= 1


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(tmp_path: Path) -> None:
    first = simulate("async", TINY, tmp_path / "first")
    assert simulate("async", TINY, tmp_path / "again") == first
    assert simulate("async", replace(TINY, seed=1), tmp_path / "other").steps != first.steps
