"""What the journal's writer is given: rows and functions, many of them in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

from gspo_agent.rollout.events import Event
from gspo_agent.rollout.state import NO_BLOBS

Outcome = tuple["Job", Any, BaseException | None]
"""A job, what its function returned, what it raised."""

_ROW_BYTES = 256  # that a row takes beside its contents, about
_EVENTS = "events (slot, at, kind, data, token_ids, logprobs, state, blob)"
_NULL = 0
_CELLS = "column1, column2, column3, column4, " + ", ".join([f"nullif(column{n}, {_NULL})" for n in (5, 6, 7, 8)])
"""What is `bytes` or None is given as a `bytearray` or _NULL: for those two, sqlite3 looks for an adapter every time,
which takes longer than the row does."""
_LEAST, _MOST = 8, 512
"""Rows of one statement."""
T = TypeVar("T")


class Job:
    """Rows, a function of the connection, or both; and who waits for them."""

    # On the class what almost none has.
    function: Callable[[sqlite3.Connection], Any] | None = None
    together: Callable[[sqlite3.Connection, list[Any]], Sequence[Any]] | None = None
    """Instead: a function of many jobs' arguments that looks at no event."""
    argument: Any = None
    full = False
    """The disk is to be flushed."""
    afterwards: Callable[[sqlite3.Connection], Any] | None = None
    """Runs when the transaction, and every other of its batch, is on disk."""
    waiter: Future[Any] | asyncio.Future[Any] | None = None
    blobs: Mapping[str, bytes] = NO_BLOBS

    def __init__(self, slot: int = 0, events: Sequence[Event] = ()) -> None:
        """Encodes the events, so that what happens to their contents later is not written."""
        self.rows: list[Sequence[Any]] = []
        size, now = _ROW_BYTES * len(events), time.time()
        for event in events:
            row, blobs = event.encode()
            self.rows.append(
                [slot, now, *[bytearray(c) if type(c) is bytes else _NULL if c is None else c for c in row]]
            )
            _, data, token_ids, logprobs, state, _ = row
            size += len(data) + len(token_ids or b"") + len(logprobs or b"") + len(state or b"")
            if blobs:
                self.blobs = {**self.blobs, **blobs}
                size += sum(map(len, blobs.values()))
        self.size = size
        """Bytes that it takes up while it is queued, about."""


class JobError(Exception):
    """The function of some job failed, by no fault of the database."""


def run_together(connection: sqlite3.Connection, batch: Sequence[Job]) -> list[Outcome]:
    """All jobs of a batch, with as few statements as will do: each gives up the interpreter's lock, and has to win it
    back from the event loop. Raises JobError at the first that fails."""
    outcomes: list[Outcome] = []
    rows: list[Sequence[Any]] = []
    alike: list[Job] = []
    for job in batch:
        other = job.function is not None or job.together not in (None, alike[0].together if alike else None)
        if alike and other:
            outcomes += _run_alike(connection, alike)
            alike = []
        rows += job.rows
        if job.together is not None:
            alike.append(job)
        elif job.function is not None:
            insert(connection, _EVENTS, rows, _CELLS)
            rows.clear()
            outcomes.append((job, _run(partial(job.function, connection)), None))
        elif job.waiter is not None:
            outcomes.append((job, None, None))
    if alike:
        outcomes += _run_alike(connection, alike)
    insert(connection, _EVENTS, rows, _CELLS)
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
        insert(connection, _EVENTS, job.rows, _CELLS)
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


def insert(
    connection: sqlite3.Connection, into: str, rows: Sequence[Sequence[Any]], cells: str = "*", how: str = "INSERT"
) -> Sequence[int]:
    """Rows into a table and its columns, as `cells` makes of column1, column2, .... Returns their ids, where the table
    counts them: nobody else takes one within a transaction."""
    last: int | None = 0
    for values, arguments, number in value_lists(rows):
        statement = f"{how} INTO {into} SELECT {cells} FROM {values} LIMIT ?"
        last = connection.execute(statement, (*arguments, number)).lastrowid
    assert last is not None
    return range(last - len(rows) + 1, last + 1)


def value_lists(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any], int]]:
    """The rows as tables to stand after FROM, with their arguments, and how many rows each has before rows of zeros.

    They are few, since every statement gives up the interpreter's lock half a dozen times; and of few sizes, since
    SQLite has to translate each once, which takes longer than the rows do.
    """
    for start in range(0, len(rows), _MOST):
        part = rows[start : start + _MOST]
        columns, size = len(part[0]), max(_LEAST, 1 << (len(part) - 1).bit_length())
        zeros = [0] * (columns * (size - len(part)))
        yield _values(columns, size), [*chain.from_iterable(part), *zeros], len(part)


@cache
def _values(columns: int, rows: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return f"(VALUES {', '.join([row] * rows)})"


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
