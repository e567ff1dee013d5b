"""Waiting that is not an episode's own time: for its turn at something shared, for a judge. Whoever runs it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class _Parts:
    """How many parts of one episode work; the last one that begins to wait, and the first that goes on, are told."""

    def __init__(self, wait: Callable[[str], object], go_on: Callable[[], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self._wait, self._go_on, self._working = wait, go_on, 1

    def less(self, what: str) -> None:
        self._working -= 1
        if not self._working:
            self._wait(what)

    def more(self) -> None:
        self._working += 1
        if self._working == 1:
            self._go_on()


_current: ContextVar[_Parts | None] = ContextVar("parts", default=None)


@contextmanager
def told(wait: Callable[[str], object], go_on: Callable[[], object]) -> Iterator[None]:
    """In here, `wait(what)` is called when all that the episode does is wait aside, `go_on()` when it works again."""
    token = _current.set(_Parts(wait, go_on))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def aside(what: str) -> Iterator[None]:
    """In here a part of the episode waits for `what`: "quota", "judges", "tools" for a tool's turn at something that it
    shares, or "" for parts of its own."""
    parts = _here()
    if parts is None:
        yield
        return
    parts.less(what)
    try:
        yield
    finally:
        parts.more()


@contextmanager
def part() -> Iterator[None]:
    """In here one part more works. Who starts several waits for them aside."""
    parts = _here()
    if parts is None:
        yield
        return
    parts.more()
    try:
        yield
    finally:
        parts.less("")


def _here() -> _Parts | None:
    """None in code that no episode runs, or that runs in another event loop than the episode."""
    parts = _current.get()
    return parts if parts is not None and parts.loop is asyncio.get_running_loop() else None
