"""Drift: whether the engine's log-probabilities move away from the learner's under the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gspo_agent.monitor.curve import Point

METRIC = "logprob_diff_at_zero_updates/mean"
_STEPS = 5
"""Steps whose mean is one figure: a single step may hold few fresh tokens."""


class DriftAlarm:
    """Watches the mean |learner's - engine's logprob| of tokens that the learner's own weights sampled.

    What kernels and dtypes make of one model has a level and no trend. Where it rises, the engine samples from
    something else than what is trained: weights that arrive incompletely, another temperature, a precision that the
    weights have outgrown; and every ratio is wrong by as much.

    >>> alarm = DriftAlarm(0.02, run.steps())
    >>> if warning := alarm.step(step, metrics):
    ...     print(warning)
    """

    def __init__(self, bound: float, earlier: Iterable[Point] = ()) -> None:
        """`earlier`: (step, metrics) of what earlier lives of the run have done."""
        self.bound = bound
        self._first: list[tuple[int, float]] = []
        self._last: list[tuple[int, float]] = []
        self._warned = bound / 2
        """The figure that was warned of last; a warning comes again at twice of it."""
        for step, metrics in earlier:
            self.step(step, metrics)

    def step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Takes a step's metrics, which may lack the figure; a warning once the last steps are over the bound, and
        again whenever the figure has doubled, or has risen anew from below half of the bound."""
        if METRIC not in metrics:
            return None
        self._first = [*self._first, (step, float(metrics[METRIC]))][:_STEPS]
        self._last = [*self._last, (step, float(metrics[METRIC]))][-_STEPS:]
        now = _mean(self._last)
        if now <= self.bound / 2:  # not at the bound itself: around it every other step would warn
            self._warned = self.bound / 2
        if now <= self.bound or now < 2 * self._warned:
            return None
        self._warned = now
        return (
            f"the engine's log-probabilities drift from the learner's: under the same weights they differ by {now:.3g} "
            f"{_steps(self._last)} ({_mean(self._first):.3g} {_steps(self._first)}), more than "
            f"learner.max_logprob_diff = {self.bound:g} allows; compare dtype, kernels and temperature of both, and "
            "whether every weight reaches the engine"
        )


def _mean(values: list[tuple[int, float]]) -> float:
    return sum(value for _, value in values) / len(values)


def _steps(values: list[tuple[int, float]]) -> str:
    first, last = values[0][0], values[-1][0]
    return f"in step {first}" if first == last else f"in steps {first} to {last}"
