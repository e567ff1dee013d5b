from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """As few intervals as cover the same numbers."""
    merged: list[Interval] = []
    for low, high in intervals:
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """The length of all of them, what they share counted once."""
    return sum(high - low for low, high in merge(intervals))
