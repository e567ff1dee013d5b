"""What the journal's writer is given: rows and functions, many of them in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, TypeVar

from gspo_agent.rollout.events import Event
from gspo_agent.rollout.state import NO_BLOBS

Outcome = tuple["Job", Any, BaseException | None]
"""A job, what its function returned, what it raised."""

_ROW_BYTES = 256  # that a row takes beside its contents, about
_COLUMNS = "slot, at, kind, data, token_ids, logprobs, state, blob"
_MANY = 64
"""Rows or arguments of one statement, at most."""
_FEW = 8
T = TypeVar("T")


class Job:
    """Rows, a function of the connection, or both; and who waits for them."""

    __slots__ = ("afterwards", "argument", "blobs", "full", "function", "rows", "size", "together", "waiter")

    def __init__(self, slot: int = 0, events: Sequence[Event] = ()) -> None:
        """Encodes the events, so that what happens to their contents later is not written."""
        self.function: Callable[[sqlite3.Connection], Any] | None = None
        self.together: Callable[[sqlite3.Connection, list[Any]], Sequence[Any]] | None = None
        """Instead: a function of many jobs' arguments that looks at no event."""
        self.argument: Any = None
        self.full = False
        """The disk is to be flushed."""
        self.afterwards: Callable[[sqlite3.Connection], Any] | None = None
        """Runs when the transaction, and every other of its batch, is on disk."""
        self.waiter: Future[Any] | asyncio.Future[Any] | None = None
        self.rows: list[tuple[Any, ...]] = []
        self.blobs: Mapping[str, bytes] = NO_BLOBS
        self.size = _ROW_BYTES * len(events)
        """Bytes that it takes up while it is queued, about."""
        place = (slot, time.time())
        for event in events:
            row, blobs = event.encode()
            self.rows.append(place + row)
            _, data, token_ids, logprobs, state, _ = row
            self.size += len(data)
            if token_ids is not None:
                self.size += len(token_ids) + (0 if logprobs is None else len(logprobs))
            if state is not None:
                self.size += len(state)
            if blobs:
                self.blobs = {**self.blobs, **blobs}
                self.size += sum(map(len, blobs.values()))


class JobError(Exception):
    """The function of some job failed, by no fault of the database."""


def run_together(connection: sqlite3.Connection, batch: Sequence[Job]) -> list[Outcome]:
    """All jobs of a batch, with as few statements as will do: each gives up the interpreter's lock, and has to win it
    back from the event loop. Raises JobError at the first that fails."""
    outcomes: list[Outcome] = []
    rows: list[tuple[Any, ...]] = []
    alike: list[Job] = []
    for job in batch:
        other = job.function is not None or job.together not in (None, alike[0].together if alike else None)
        if alike and (other or len(alike) == _MANY):
            outcomes += _run_alike(connection, alike)
            alike = []
        rows += job.rows
        if job.together is not None:
            alike.append(job)
        elif job.function is not None:
            _insert(connection, rows)
            rows.clear()
            outcomes.append((job, _run(partial(job.function, connection)), None))
        elif job.waiter is not None:
            outcomes.append((job, None, None))
    if alike:
        outcomes += _run_alike(connection, alike)
    _insert(connection, rows)
    return outcomes


def _run_alike(connection: sqlite3.Connection, jobs: list[Job]) -> list[Outcome]:
    together, arguments = jobs[0].together, [job.argument for job in jobs]
    assert together is not None
    return [
        (job, result, None) for job, result in zip(jobs, _run(partial(together, connection, arguments)), strict=True)
    ]


def _run(function: Callable[[], T]) -> T:
    try:
        return function()
    except sqlite3.Error:
        raise
    except Exception as error:
        raise JobError from error


def run_alone(connection: sqlite3.Connection, job: Job) -> Outcome:
    """One job; its own error undoes what it wrote, and is its caller's alone."""
    connection.execute("SAVEPOINT job")
    result = None
    try:
        _insert(connection, job.rows)
        if job.function is not None:
            result = job.function(connection)
        elif job.together is not None:
            (result,) = job.together(connection, [job.argument])
    except sqlite3.Error:
        raise
    except Exception as error:
        connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
        return job, None, error
    connection.execute("RELEASE job")
    return job, result, None


def _insert(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    for part in in_parts(rows):
        connection.execute(_insertion(len(part)), [value for row in part for value in row])


@cache
def _insertion(number: int) -> str:
    return f"INSERT INTO events ({_COLUMNS}) VALUES {value_lists(8, number)}"


def in_parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """All of them, in few parts and in few sizes: SQLite has to translate a statement of each size once, and that takes
    longer than the rows do."""
    start = 0
    while left := min(len(rows) - start, _MANY):
        end = start + (left - left % _FEW or left)
        yield rows[start:end]
        start = end


def value_lists(columns: int, rows: int) -> str:
    """What stands after VALUES."""
    return ", ".join([f"({', '.join('?' * columns)})"] * rows)


def tell(outcomes: Sequence[Outcome]) -> None:
    """Tells who waits, in order: what has been done later is not heard of first. Those on an event loop are told
    together, since each wake-up of a loop is a system call."""
    together: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
    for job, result, error in outcomes:
        if isinstance(job.waiter, asyncio.Future):
            if together and together[-1][0].get_loop() is not job.waiter.get_loop():
                _tell_loop(together)
                together = []
            together.append((job.waiter, result, error))
        elif job.waiter is not None:
            _tell_loop(together)
            together = []
            if error is None:
                job.waiter.set_result(result)
            else:
                job.waiter.set_exception(error)
    _tell_loop(together)


def _tell_loop(waiters: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    if waiters:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            waiters[0][0].get_loop().call_soon_threadsafe(_wake, waiters)


def _wake(waiters: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for waiter, result, error in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(result)
        else:
            waiter.set_exception(error)
