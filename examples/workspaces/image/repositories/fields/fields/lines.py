from __future__ import annotations


def split(line: str) -> list[str]:
    """The fields of one line."""
    return [field.strip('"') for field in line.split(",")]
