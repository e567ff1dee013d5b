"""Watchdog: which stage of a run has work and stands still, for how long, and what waits there."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass

_LOOKED_AWAY = 10.0  # seconds between two looks after which it was this process that stood still


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage has to do right now."""

    stage: str
    waiting: Set[Hashable] = frozenset()
    """Who waits there. Whoever leaves is progress, who comes is not. Empty: nothing to do, so nothing stands still."""
    example: str = ""
    """The one who has waited longest, as a person would call it."""
    count: object = None
    """Any change of it is progress too."""


@dataclass(frozen=True, slots=True)
class Stillness:
    """A stage that had work and made no progress for too long."""

    stage: str
    seconds: float
    waiting: int
    example: str

    def __str__(self) -> str:
        who = f"; {self.waiting} wait, such as {self.example}" if self.waiting > 1 else f": {self.example}"
        return f"{self.stage}: no progress for {self.seconds:.0f} s{who if self.example else ''}"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that is worth a word from `least` on: the run looks alive, and gets nowhere."""

    kind: str
    size: float
    least: float
    text: str


class Watchdog:
    """Looks at the stages every now and then, and says each stillness once, and again whenever it has doubled.

    >>> dog = Watchdog(patience=300.0)
    >>> dog.look([Work("tools", {("3.0.1", began)}, "3.0.1 in tool search")])
    ['tools: no progress for 301 s: 3.0.1 in tool search']
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience = patience
        self.still: tuple[Stillness, ...] = ()
        """Every stage that stood still at the last look."""
        self.remarks: tuple[str, ...] = ()
        """Every remark that held at the last look."""
        self._clock, self._looked = clock, clock()
        self._since: dict[str, float] = {}
        self._before: dict[str, Work] = {}
        self._next: dict[str, float] = {}
        """Stage or kind -> the size from which on it is worth another line."""

    def look(self, stages: Iterable[Work], remarks: Iterable[Remark] = ()) -> list[str]:
        """Takes note of what there is now; returns what has to be said.

        After a look that came far too late (a suspended process, a sleeping machine) nothing is said: what stood still
        was this process, and the others have had no time yet.
        """
        now = self._clock()
        gap, self._looked = now - self._looked, now
        if gap > _LOOKED_AWAY:
            self._since = {stage: since + gap for stage, since in self._since.items()}
        still = [stillness for work in stages if (stillness := self._stillness(work, now)) is not None]
        held = [remark for remark in remarks if remark.size >= remark.least]
        self.still, self.remarks = tuple(still), tuple(remark.text for remark in held)
        names = {each.stage for each in still} | {each.kind for each in held}
        self._next = {name: size for name, size in self._next.items() if name in names}
        if gap > _LOOKED_AWAY:
            return []
        lines = [str(each) for each in still if self._due(each.stage, each.seconds)]
        return lines + [each.text for each in held if self._due(each.kind, each.size)]

    def _stillness(self, work: Work, now: float) -> Stillness | None:
        before = self._before.get(work.stage, Work(work.stage))
        self._before[work.stage] = work
        if not before.waiting or not before.waiting <= work.waiting or work.count != before.count:
            self._since[work.stage] = now
        seconds = now - self._since[work.stage]
        if not work.waiting or seconds < self.patience:
            return None
        return Stillness(work.stage, seconds, len(work.waiting), work.example)

    def _due(self, name: str, size: float) -> bool:
        if size < self._next.get(name, 0.0):
            return False
        self._next[name] = 2 * size
        return True
