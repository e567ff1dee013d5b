from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pages:
    """`size` items on each page."""

    def __init__(self, items: Sequence[Any], size: int) -> None:
        self.items, self.size = items, size

    def __len__(self) -> int:
        return len(self.items) // self.size + 1

    def __getitem__(self, number: int) -> list[Any]:
        return list(self.items[number * self.size : (number + 1) * self.size])
