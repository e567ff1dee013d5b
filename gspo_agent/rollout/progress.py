"""Progress: what a collector is doing right now, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """What is going on right now; `str()` is one line for a screen."""

    in_flight: int
    generating: int
    in_tools: int
    waiting: int
    """Episodes that wait for a place among `max_in_flight`."""
    ready_groups: int
    """Finished and not handed out."""
    open_groups: int
    failures: dict[str, int]
    """Cause -> episodes of this life."""
    restarts: int
    """Episodes that could not be gone on with and began again."""
    tokens: int
    """Sampled in this life."""

    def __str__(self) -> str:
        text = (
            f"{self.in_flight} episodes in flight ({self.generating} generating, {self.in_tools} in tools), "
            f"{self.ready_groups} groups ready, {self.tokens} tokens"
        )
        if self.failures:
            cause, number = max(self.failures.items(), key=lambda item: item[1])
            text += f", {sum(self.failures.values())} failed ({number} times {cause})"
        return text
