"""The learning curve as a picture: what was learned, and what the clipping did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

PAPER_BAND = (3e-4, 4e-4)

Point = tuple[int, Mapping[str, float]]
"""(step, metrics after it)."""


def band_title(loss: Mapping[str, object]) -> str:
    """Names the loss and its clip range, and the paper's beside it where they differ."""
    low, high = loss.get("clip_low"), loss.get("clip_high")
    if low is None or high is None:
        return str(loss["name"])
    band = f"{loss['name']}, band {low:g} / {high:g}"
    paper = f"{PAPER_BAND[0]:g} / {PAPER_BAND[1]:g}"
    return f"{band} (the paper's)" if (low, high) == PAPER_BAND else f"{band} (the paper's: {paper})"


def draw(path: Path, steps: Sequence[Point], held_out: Sequence[Point], title: str) -> None:
    """Writes a PNG: pass rate, tool use and retries over the steps above, clip fraction per mini-batch below."""
    # Agg, through the object interface: no display, no global state, safe in a thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(title, fontsize=10)
    for name, label, colour in (
        ("pass_rate", "pass rate, training", "tab:blue"),
        ("tool_use", "uses a tool", "tab:green"),
        ("retry_after_error", "calls again after a failed call", "tab:orange"),
    ):
        points = [(step, metrics[name]) for step, metrics in steps if name in metrics]
        if points:
            above.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.3)
    points = [(step, metrics["pass_rate"]) for step, metrics in held_out if "pass_rate" in metrics]
    if points:
        above.plot(*zip(*points, strict=True), "o--", color="black", label="pass rate, held out")
    above.set_ylim(-0.02, 1.02)
    above.set_ylabel("share of episodes")
    above.grid(alpha=0.3)
    above.legend(fontsize=8, loc="lower right")
    names = sorted({name for _, metrics in steps for name in metrics if name.startswith("clip_frac/")})
    for name in names:
        points = [(step, metrics[name]) for step, metrics in steps if name in metrics]
        below.plot(*zip(*points, strict=True), label=f"mini-batch {int(name.split('/')[1]) + 1}", linewidth=1.1)
    if names:
        below.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=min(6, len(names)), frameon=False)
    below.set_ylim(-0.02, 1.02)
    below.set_ylabel("share of tokens clipped")
    below.set_xlabel("training step")
    below.grid(alpha=0.3)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)


def sparkline(values: Sequence[float]) -> str:
    """The values as one line of blocks, 0 to 1."""
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[min(7, max(0, int(value * 8)))] for value in values)
