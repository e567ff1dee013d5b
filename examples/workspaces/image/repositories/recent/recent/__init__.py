"""A small cache."""

from __future__ import annotations

from typing import Any


class Recent:
    """Keeps the `size` entries that were used last."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size {size} is not above 0")
        self.size = size
        self._entries: dict[Any, Any] = {}

    def put(self, key: Any, value: Any) -> None:
        if len(self._entries) >= self.size:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        return self._entries.get(key, default)

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[Any]:
        """From the one that is forgotten first."""
        return list(self._entries)
