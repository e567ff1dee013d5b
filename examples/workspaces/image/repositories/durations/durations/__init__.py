"""Lengths of time as people write them."""

from durations.text import parse, show

__all__ = ["parse", "show"]
