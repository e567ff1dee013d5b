"""Closed intervals of numbers."""

from intervals.merging import merge, total

__all__ = ["merge", "total"]
