"""Watchdog: which stage of a run has work and stands still, for how long, and what waits there."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
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
        self._clock, self._looked, self._away = clock, clock(), False
        self._since: dict[str, float] = {}
        self._before: dict[str, Work] = {}
        # Stage or kind -> the size from which on it is worth another line.
        self._next_stillness: dict[str, float] = {}
        self._next_remark: dict[str, float] = {}

    def look(self, stages: Iterable[Work]) -> list[str]:
        """Takes note of what there is now; returns what has to be said.

        After a look that came far too late (a suspended process, a sleeping machine) nothing is said: what stood still
        was this process, and the others have had no time yet.
        """
        now = self._clock()
        gap, self._looked = now - self._looked, now
        self._away = gap > _LOOKED_AWAY
        if self._away:
            self._since = {stage: since + gap for stage, since in self._since.items()}
        self.still = tuple(still for work in stages if (still := self._stillness(work, now)) is not None)
        return self._due(self._next_stillness, [(each.stage, each.seconds, str(each)) for each in self.still])

    def moves(self, stage: str, seconds: float) -> bool:
        """Whether the stage has made progress, or had nothing to do, within the last `seconds`."""
        return self._looked - self._since.get(stage, self._looked) < seconds

    def hear(self, remarks: Iterable[Remark]) -> list[str]:
        """The same for remarks, after `look`."""
        held = [remark for remark in remarks if remark.size >= remark.least]
        self.remarks = tuple(remark.text for remark in held)
        return self._due(self._next_remark, [(each.kind, each.size, each.text) for each in held])

    def _stillness(self, work: Work, now: float) -> Stillness | None:
        before = self._before.get(work.stage, Work(work.stage))
        self._before[work.stage] = work
        if not before.waiting or not before.waiting <= work.waiting or work.count != before.count:
            self._since[work.stage] = now
        seconds = now - self._since[work.stage]
        if not work.waiting or seconds < self.patience:
            return None
        return Stillness(work.stage, seconds, len(work.waiting), work.example)

    def _due(self, following: dict[str, float], now: Sequence[tuple[str, float, str]]) -> list[str]:
        """Of (name, size, text), the texts that are new or have doubled; `following` forgets what is over."""
        for name in following.keys() - {name for name, *_ in now}:
            del following[name]
        if self._away:
            return []
        due = [each for each in now if each[1] >= following.get(each[0], 0.0)]
        following.update((name, 2 * size) for name, size, _ in due)
        return [text for *_, text in due]
