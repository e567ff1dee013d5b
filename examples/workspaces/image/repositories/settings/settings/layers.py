from __future__ import annotations

from typing import Any

from settings._version import VERSION as VERSION


def merge(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, table by table; None takes a default away."""
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            defaults[key] = merge(defaults[key], value)
        elif value is None:
            defaults.pop(key, None)
        else:
            defaults[key] = value
    return defaults
