"""Verdicts: how long one may take, and what an author's `score` returned -> one reward and its named components."""

from __future__ import annotations

import difflib
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from gspo_agent.clock import Clock, within
from gspo_agent.errors import EnvError, Unscored
from gspo_agent.waiting import aside, told


@asynccontextmanager
async def verdict_within(seconds: float | None, judge: str) -> AsyncIterator[None]:
    """Raises Unscored where no verdict comes in time. The judge's time is not the episode's own, and what the judge
    waits aside for, as its turn in the sandbox, is not the judge's."""
    clock = Clock()
    try:
        with aside("judges"), told(lambda what: clock.stop(), clock.go):
            async with within(clock, seconds) as deadline:
                yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise Unscored(f"{judge} gave no verdict within limits.score, {seconds:g} s") from error


def weigh(score: Any, weights: Mapping[str, float] | None, env: str) -> tuple[float, dict[str, float]]:
    """The weighted sum, and the unweighted components. A bare number is the component "score".

    Raises EnvError for what is no number or a weight without a component, Unscored for NaN and infinity.
    """
    components = dict(score) if isinstance(score, Mapping) else {"score": score}
    for name, value in components.items():
        if isinstance(value, bool | np.bool_ | int | np.integer | float | np.floating):
            components[name] = float(value)
        else:
            kind = type(value).__name__
            raise EnvError(f"{env}.score: component {name!r} is {value!r}, a {kind}; return a number for it")
        if not math.isfinite(components[name]):
            raise Unscored(f"{env}.score: component {name!r} is {value}; raise Unscored where there is no verdict")
    if weights is None:
        return sum(components.values()), components
    for name in weights:
        if name not in components:
            near = difflib.get_close_matches(name, components, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it gave {', '.join(map(repr, components)) or 'none'}"
            raise EnvError(f"{env}.score gave no component {name!r}, which `rewards` gives a weight; {hint}")
    return sum(weight * components[name] for name, weight in weights.items()), components
