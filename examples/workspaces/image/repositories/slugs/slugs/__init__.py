"""Titles as parts of addresses."""

from slugs.text import slug

__all__ = ["slug"]
