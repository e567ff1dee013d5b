"""The alarm of a drift between engine and learner: heard when it rises over the bound, and not before."""

from __future__ import annotations

import pytest

from gspo_agent.monitor.drift import METRIC, DriftAlarm


def warnings(alarm: DriftAlarm, figures: list[float], first: int = 1) -> dict[int, str]:
    """Step -> what was said."""
    said = {step: alarm.step(step, {METRIC: figure}) for step, figure in enumerate(figures, start=first)}
    return {step: text for step, text in said.items() if text}


def test_a_slow_rise_is_said_once_with_the_figure_it_began_with_and_the_present_one() -> None:
    rise = [0.011 + (0.036 - 0.011) * n / 29 for n in range(30)]
    ((step, text),) = warnings(DriftAlarm(0.02), rise).items()
    assert step == 14  # five steps whose mean is the first over the bound
    assert "they differ by 0.0205 in steps 10 to 14 (0.0127 in steps 1 to 5)" in text
    assert "learner.max_logprob_diff = 0.02" in text
    assert "dtype" in text


@pytest.mark.parametrize("figures", [[0.011] * 40, [1e-7, 3e-7] * 20, [0.018, 0.02] * 20, [0.01] * 9 + [0.05] + [0.01]])
def test_a_level_below_the_bound_is_no_drift_nor_is_one_odd_step(figures: list[float]) -> None:
    assert warnings(DriftAlarm(0.02), figures) == {}


def test_it_is_said_again_when_it_has_doubled_and_when_it_comes_back() -> None:
    alarm = DriftAlarm(0.02)
    assert list(warnings(alarm, [0.03] * 20)) == [1]
    assert list(warnings(alarm, [0.07] * 20, first=21)) == [24]
    assert warnings(alarm, [0.005] * 20, first=41) == {}
    assert list(warnings(alarm, [0.03] * 20, first=61)) == [64]
    assert warnings(alarm, [0.019, 0.022] * 20, first=81) == {}  # around the bound, not again and again


def test_a_restart_neither_forgets_where_it_began_nor_says_everything_again() -> None:
    whole, cut = DriftAlarm(0.02), DriftAlarm(0.02)
    rise = [0.011 * 1.06**n for n in range(40)]
    said = warnings(whole, rise)
    assert len(said) >= 3
    before = warnings(cut, rise[:15])
    again = DriftAlarm(0.02, [(n + 1, {METRIC: figure}) for n, figure in enumerate(rise[:15])])
    assert before | warnings(again, rise[15:], first=16) == said


def test_steps_without_fresh_tokens_say_nothing() -> None:
    alarm = DriftAlarm(0.02)
    assert alarm.step(1, {"loss": 0.0}) is None
    assert "in step 2 (0.5 in step 2)" in str(alarm.step(2, {METRIC: 0.5}))
