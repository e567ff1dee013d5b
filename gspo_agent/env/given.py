"""Given: the task that a runner keeps, so that states need not hold what an author still has of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

_LONG = 64  # characters from which on a text is worth its place


class Given:
    """A JSON object, and the one copy of it that an author gets, and may change or take apart."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value, self.copy = value, copy.deepcopy(value)
        self._parts: dict[int, tuple[list[str | int], Any, Any]] = {}
        """Id of a part of the copy -> (its keys, the part it was copied from, itself: an id lasts as long as that)."""
        self._note(self.copy, value, [])

    def place(self, part: Any) -> list[str | int] | None:
        """The keys that lead to `part` in the copy, where it and all that is in it are still what they were."""
        found = self._parts.get(id(part))
        return found[0] if found is not None and self._unchanged(part, found[1]) else None

    def at(self, place: Sequence[str | int]) -> Any:
        """The part of the copy that these keys lead to."""
        part: Any = self.copy
        for key in place:
            part = part[key]
        return part

    def _note(self, part: Any, original: Any, place: list[str | int]) -> None:
        if type(part) is str:
            if len(part) >= _LONG:
                self._parts.setdefault(id(part), (place, original, part))
        elif type(part) in (dict, list):
            self._parts[id(part)] = place, original, part
            for key in part if type(part) is dict else range(len(part)):
                self._note(part[key], original[key], [*place, key])

    def _unchanged(self, part: Any, original: Any) -> bool:
        # Copying keeps texts and numbers the objects they are; what was put there anew may be equal and yet another.
        if type(part) not in (dict, list):
            return part is original
        if self._parts.get(id(part), ([], ..., None))[1] is not original or len(part) != len(original):
            return False
        if type(part) is list:
            return all(map(self._unchanged, part, original))
        return all(map(str.__eq__, part, original)) and all(map(self._unchanged, part.values(), original.values()))
