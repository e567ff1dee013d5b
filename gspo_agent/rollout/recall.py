"""Recall: unfinished episodes as the log has them. What is asked for together is read together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future

from gspo_agent.errors import JournalError
from gspo_agent.rollout.events import Episode, fold
from gspo_agent.rollout.journal import Journal, read_events
from gspo_agent.rollout.ledger import Slot

_MANY = 100_000  # objects that were made in a pause: from here on they are not gone through even once


class Recall:
    """Reads what an earlier life has left. Ten thousand episodes at a start wake writer and event loop once, not ten
    thousand times, and the writer, which meanwhile has nothing to write, need not share the interpreter."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._asked: list[tuple[Slot, asyncio.Future[Episode]]] = []
        """In this turn of the event loop."""

    async def episode(self, slot: Slot) -> Episode:
        """Waits for the slot's events. Raises JournalError where one of them is damaged, naming it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Episode] = loop.create_future()
        self._asked.append((slot, answer))
        if len(self._asked) == 1:
            loop.call_soon(self._read)
        return await answer

    def _read(self) -> None:
        asked, self._asked = self._asked, []
        slots, loop, pause = [slot for slot, _ in asked], asyncio.get_running_loop(), _GarbagePause()

        def answer(found: Sequence[Episode | BaseException]) -> None:
            for (_, waiter), each in zip(asked, found, strict=True):
                if waiter.done():  # who asked was cancelled
                    continue
                if isinstance(each, Episode):
                    waiter.set_result(each)
                else:
                    waiter.set_exception(each)
            # Behind all who were just woken: what they make of the episodes, up to where they wait, stays as well.
            loop.call_soon(pause.end)

        def hand_over(read: Future[list[Episode | JournalError]]) -> None:
            failure = read.exception()
            found: Sequence[Episode | BaseException] = [failure] * len(asked) if failure else read.result()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(answer, found)

        try:
            self._journal.submit(lambda connection: self._episodes(connection, slots)).add_done_callback(hand_over)
        except JournalError as error:
            answer([error] * len(asked))

    def _episodes(self, connection: sqlite3.Connection, slots: Sequence[Slot]) -> list[Episode | JournalError]:
        found: list[Episode | JournalError] = []
        for slot in slots:
            try:
                found.append(fold(slot.trajectory(), read_events(connection, slot.id, self._journal.blobs)))
            except JournalError as error:  # of this slot alone
                found.append(error)
        return found


class _GarbagePause:
    """Holds the garbage collector still until `end`, or until nobody has it any more.

    While a million objects are made that all stay, it would go through all of them a dozen times and find nothing.
    """

    def __init__(self) -> None:
        self._holds = gc.isenabled()
        gc.disable()

    def end(self) -> None:
        if not self._holds:
            return
        self._holds = False
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            # To the permanent generation and from there to the oldest: as if they had been gone through.
            gc.freeze()
            gc.unfreeze()
        gc.enable()

    def __del__(self) -> None:
        self.end()
