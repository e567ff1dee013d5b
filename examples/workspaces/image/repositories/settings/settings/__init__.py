"""Settings in layers."""

from settings.layers import VERSION, merge

__all__ = ["VERSION", "merge"]
