from __future__ import annotations

import re

from durations.units import UNITS


def parse(text: str) -> int:
    """Seconds."""
    return sum(int(number) * UNITS.get(unit, 1) for number, unit in re.findall(r"(\d+)([dhs]?)", text))


def show(seconds: int) -> str:
    parts = []
    for unit, size in UNITS.items():
        if seconds >= size:
            parts.append(f"{seconds // size}{unit}")
            seconds %= size
    return "".join(parts) or "0s"
