"""The picture of the long-tail simulation: what a step takes, what is thrown away, how old tokens are, who is busy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from tests.benchmarks.long_tail import Outcome

COLORS = {"sync": "#6b7280", "discard": "#d97706", "carry_over": "#2563eb", "async": "#059669"}
_MOST_LAGS = 6


def draw(outcomes: list[Outcome], path: Path) -> None:
    """One PNG for all modes."""
    rows = len(outcomes)
    figure = Figure(figsize=(14, 4.2 + 1.05 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.0 + 0.42 * rows, 0.9 * rows])
    times, tokens, lags = above.subplots(1, 3, sharey=True)
    _draw_times(times, outcomes)
    _draw_tokens(tokens, outcomes)
    _draw_lags(lags, outcomes)
    times.set_yticks(range(rows), [outcome.name for outcome in outcomes])
    times.invert_yaxis()
    strips = below.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    below.suptitle(
        "slots that sample, over simulated time (shaded: the learner works; lines: a step ends)", fontsize=11
    )
    span = min(_seconds(outcome, outcome.measured[-1].ended) for outcome in outcomes)
    for strip, outcome in zip(strips, outcomes, strict=True):
        _draw_strip(strip, outcome, span)
    strips[-1].set_xlabel("seconds since the end of the warm-up")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _seconds(outcome: Outcome, tick: int) -> float:
    return (tick - outcome.measured[0].began) * outcome.scale.token_seconds


def _draw_times(axes: Any, outcomes: list[Outcome]) -> None:
    places = np.arange(len(outcomes))
    bars = axes.barh(places, [o.seconds for o in outcomes], 0.7, color=[COLORS[o.mode] for o in outcomes])
    axes.bar_label(bars, [f"{o.seconds:.0f} s, {o.seconds / o.bound:.2f}x" for o in outcomes], padding=4, fontsize=9)
    bounds = np.array([o.bound for o in outcomes])
    axes.vlines(bounds, places - 0.45, places + 0.45, color="black", lw=2, label="perfect bound")
    axes.set_xlim(0, 1.35 * max(o.seconds for o in outcomes))
    axes.set_title("time per step, and as a multiple of the bound", fontsize=11)
    axes.set_xlabel("seconds")
    _add_legend(axes, 3)


def _draw_tokens(axes: Any, outcomes: list[Outcome]) -> None:
    places, steps = np.arange(len(outcomes)), np.array([len(o.steps) for o in outcomes])
    trained = np.array([o.trained for o in outcomes]) / steps / 1000
    kept = np.array([o.unfinished for o in outcomes]) / steps / 1000
    thrown = np.array([o.thrown_away for o in outcomes]) / steps / 1000
    axes.barh(places, trained, 0.7, color="#93c5fd", label="trained on")
    axes.barh(places, kept, 0.7, left=trained, color="#bbf7d0", label="kept for later steps")
    bars = axes.barh(places, thrown, 0.7, left=trained + kept, color="#dc2626", label="thrown away")
    labels = [f"{o.thrown_away / o.sampled:.0%} thrown away" if o.thrown_away else "0 thrown away" for o in outcomes]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_xlim(0, 1.5 * float((trained + kept + thrown).max()))
    axes.set_title("tokens sampled, per step of the run", fontsize=11)
    axes.set_xlabel("thousands")
    _add_legend(axes, 3)


def _draw_lags(axes: Any, outcomes: list[Outcome]) -> None:
    places, left = np.arange(len(outcomes)), np.zeros(len(outcomes))
    most = min(max(max(o.staleness) for o in outcomes), _MOST_LAGS)
    for lag in range(1, most + 1):
        last = lag == _MOST_LAGS
        shares = np.array([sum(s for n, s in o.staleness.items() if n == lag or (last and n > lag)) for o in outcomes])
        color = colormaps["viridis_r"](0.05 + 0.9 * (lag - 1) / _MOST_LAGS)
        bars = axes.barh(places, 100 * shares, 0.7, left=100 * left, color=color, label=f"{lag}{'+' * last}")
        dark = lag > _MOST_LAGS / 2
        labels = [f"{share:.0%}" if share > 0.06 else "" for share in shares]
        axes.bar_label(bars, labels, label_type="center", fontsize=9, color="white" if dark else "black")
        left += shares
    axes.set_xlim(0, 100)
    axes.set_title("staleness of what is trained on: lag in steps (1: fresh)", fontsize=11)
    axes.set_xlabel("% of tokens")
    _add_legend(axes, most)


def _add_legend(axes: Any, columns: int) -> None:
    """Below, where no bar is."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, fontsize=9, frameon=False)


def _draw_strip(axes: Any, outcome: Outcome, span: float) -> None:
    ticks, busy = zip(*outcome.occupancy, (outcome.steps[-1].ended, 0), strict=True)
    seconds = [_seconds(outcome, tick) for tick in ticks]
    axes.fill_between(seconds, busy, step="post", color=COLORS[outcome.mode], lw=0)
    for step in outcome.measured:
        axes.axvspan(_seconds(outcome, step.learned), _seconds(outcome, step.ended), color="black", alpha=0.12, lw=0)
        axes.axvline(_seconds(outcome, step.ended), color="black", lw=0.8)
    axes.set_xlim(0, span)
    axes.set_ylim(0, outcome.scale.slots)
    axes.set_yticks([0, outcome.scale.slots])
    axes.set_title(f"{outcome.name}: {outcome.utilisation:.0%} busy", fontsize=9, loc="left", pad=2)
