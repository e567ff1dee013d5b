"""What a person sees in the terminal while a run goes on: one line a step, and one live line about now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gspo_agent.config import Config
from gspo_agent.monitor.curve import Point, band_title, sparkline
from gspo_agent.rollout.stages import Phase
from gspo_agent.rollout.status import COUNT, counts

_SECONDS_BETWEEN_CURVES = 10.0
_SECONDS_OF_SILENCE = 60.0


class Screen:
    """Lines for the terminal. On a pipe, one for each step and evaluation, and after a minute without either, one that
    says what is being waited for."""

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._phase, self._since = "starting", time.monotonic()
        self._done = self._total = 0
        self._progress: Callable[[], Any] | None = None
        self._engine: Callable[[], Mapping[str, Any]] | None = None
        self._concerns: Callable[[], str] | None = None
        self._last_step = self._last_curve = time.monotonic()
        self._last_tokens = 0
        self._live: Live | None = None
        self._ended = threading.Event()
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._line, console=self.console, refresh_per_second=4, transient=True, screen=False
            )
            self._live.start()
        else:
            threading.Thread(target=self._say_what_lasts, name="screen", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._live is not None:
            with suppress(OSError):  # the terminal is gone, and whoever left it knows
                self._live.stop()

    def note(self, text: str, style: str = "") -> None:
        """One line that stays."""
        self._printed = time.monotonic()
        self.console.print(text, style=style)

    def _say_what_lasts(self) -> None:
        while not self._ended.wait(_SECONDS_OF_SILENCE / 10):
            if time.monotonic() - self._printed > _SECONDS_OF_SILENCE:
                self.note(self._line().plain)

    def phase(self, text: str) -> None:
        """Names what the run is doing, or waiting for, from now on."""
        self._phase, self._since = text, time.monotonic()
        self._done = self._total = 0
        if not self.console.is_terminal and text.startswith(("cold start", "restoring", "measuring")):
            self.note(text)

    def now(self) -> Phase:
        """What the run is doing, and how far it is."""
        return Phase(self._phase, self._since, self._done)

    def advance(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def watch(
        self,
        progress: Callable[[], Any],
        engine: Callable[[], Mapping[str, Any]],
        concerns: Callable[[], str] | None = None,
    ) -> None:
        """From now on the live line also shows what the collector and the engine say, and before it what stands still
        (`concerns`; "" where nothing does)."""
        self._progress, self._engine, self._concerns = progress, engine, concerns
        self._begin_step()

    def _begin_step(self) -> None:
        """What is measured from here on belongs to the next step."""
        self._last_step = time.monotonic()
        self._last_tokens = int(self._engine()["tokens"]) if self._engine else 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        tokens = int(self._engine()["tokens"]) if self._engine else 0
        rate = (tokens - self._last_tokens) / max(1e-9, now - self._last_step)
        seconds, self._last_step, self._last_tokens = now - self._last_step, now, tokens
        parts = [f"step {step}/{self.config.run.steps}"]
        for name, label in (
            ("reward/mean", "reward"),
            ("pass_rate", "pass"),
            ("tool_use", "tool use"),
            ("retry_after_error", "retries"),
        ):
            if name in metrics:
                parts.append(f"{label} {metrics[name]:.2f}")
        clip = [f"{metrics[name]:.2f}" for name in sorted(metrics) if name.startswith("clip_frac/")]
        if clip:
            parts.append("clipped " + " ".join(clip))
        if "staleness/max" in metrics:
            parts.append(f"age {metrics['staleness/mean']:.1f}")
        parts += [f"{rate:,.0f} tok/s", f"{seconds:.1f} s"]
        flat, trained = int(metrics.get("groups/filtered", 0)), int(metrics.get("groups_without_advantage", 0))
        if trained and trained == metrics.get("groups"):
            parts.append("nothing learned: in every group all rewards are equal")
        elif flat:
            parts.append(f"{flat} group{'s' if flat > 1 else ''} of equal rewards left out")
        self.note("  ".join(parts))

    def evaluation(self, step: int, metrics: Mapping[str, float], failures: Sequence[str] = ()) -> None:
        parts = [f"held out after step {step}:"]
        if "pass_rate" in metrics:
            parts.append(f"pass rate {metrics['pass_rate']:.3f} ± {metrics['pass_rate/standard_error']:.3f}")
        for name, label in (("tool_use", "tool use"), ("retry_after_error", "retry after an error")):
            if name in metrics:
                parts.append(f"{label} {metrics[name]:.2f}")
        parts += [f"{name[4:]} {value:.2f}" for name, value in metrics.items() if name.startswith("env/")]
        counted = {name.removeprefix(COUNT): round(n) for name, n in metrics.items() if name.startswith(COUNT)}
        parts += [counts(counted)] * bool(counted)
        parts.append(f"({metrics.get('episodes', 0):.0f} episodes)")
        if failures:
            parts.append(f"{len(failures)} failed and are in no rate, the first with {failures[0]}")
        self.note("  ".join(parts), "bold")
        self._begin_step()

    def time_to_draw(self) -> bool:
        """True at most every ten seconds."""
        now = time.monotonic()
        if now - self._last_curve < _SECONDS_BETWEEN_CURVES:
            return False
        self._last_curve = now
        return True

    def finished(self, steps: Sequence[Point], held_out: Sequence[Point], curve: Path) -> None:
        """Before and after, the curve as a line, and where the picture of it lies."""
        self.phase("done")
        rates = [metrics["pass_rate"] for _, metrics in steps if "pass_rate" in metrics]
        self.console.print(f"{band_title(self.config.learner.loss.model_dump())}; {len(steps)} steps")
        if rates:
            self.console.print(f"pass rate in training  {sparkline(rates)}  {rates[0]:.2f} -> {rates[-1]:.2f}")
        if len(held_out) > 1:
            for name, label in (
                ("pass_rate", "pass rate"),
                ("tool_use", "tool use"),
                ("retry_after_error", "retry after an error"),
            ):
                before, after = held_out[0][1].get(name), held_out[-1][1].get(name)
                if before is not None and after is not None:
                    self.console.print(f"held out: {label:<21} {before:.3f} -> {after:.3f}", style="bold")
        self.console.print(f"curve: {curve}")

    def _line(self) -> Text:
        parts = [f"{self._phase} ({time.monotonic() - self._since:.0f} s)"]
        if self._total:
            filled = int(20 * self._done / self._total)
            parts.append("█" * filled + "·" * (20 - filled) + f" {self._done}/{self._total}")
        if self._concerns is not None and (concerns := self._concerns()):
            parts.append(f"WARNING: {concerns}")
        if self._progress is not None:
            parts.append(str(self._progress()))
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis", style="dim")
