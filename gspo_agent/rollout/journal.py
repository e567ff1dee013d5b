"""The durable log of a run: one SQLite file, one writer thread, group commit.

Events are written behind; what must be on disk before something happens (a tool call, a lease, the commit of a step)
is awaited. `gspo_agent.rollout.schema` has the tables, `events` what is in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from gspo_agent.errors import JournalError
from gspo_agent.rollout import lock, remains, schema
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.events import Event, Row, decode
from gspo_agent.rollout.jobs import Job, JobError, Outcome, run_alone, run_together, tell

A = TypeVar("A")
T = TypeVar("T")
_LINGER = 0.02  # seconds in which write-behind rows gather into one transaction
_SHORT_LINGER = 0.001  # the same where somebody waits, and the last transaction took no time
_REST = 4  # times as long as a transaction took, the writer lets jobs gather for the next, if more of them come
_LONGEST_REST = 0.05
_LOOKS = 5  # whether more have come, in such a time
QUEUED_BYTES = 64 << 20
"""What may wait for the disk before `Journal.room` asks for patience."""


class Journal:
    """The log of one run, open for writing. One process has it; `close` (or `with`) ends its life.

    >>> with Journal.open(Path("runs/shop/journal.sqlite")) as journal:
    ...     ledger = Ledger(journal)

    The caller's threads only encode and queue; SQLite runs in the writer's thread. Once a write has failed, that
    failure is what every later call raises, so nothing goes on as if it were durable.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, held: lock.RunLock, life: int, run_id: str,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:  # fmt: skip
        self.path, self.life, self.run_id = path, life, run_id
        self.blobs = BlobStore(path.parent / "blobs")
        self._connection, self._lock = connection, held
        self._durable_always = connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        # Not a queue.Queue: waking the writer for every row would cost more than writing the row.
        self._jobs: deque[Job] = deque()
        self._batch: list[Job] = []
        """What the writer is writing."""
        self._some, self._hurry = threading.Event(), threading.Event()
        # Each is written by one thread alone.
        self._bytes_put = self._bytes_written = 0
        self._queued_bytes = queued_bytes
        self.commits = 0
        """Transactions that are on disk."""
        self._without_room: deque[asyncio.Future[None]] = deque()
        self._failure: JournalError | None = None
        self._closed = self._last_batch = False
        self._last_beat = time.monotonic()
        self._place = remains.Place(path, by_name=schema.on_network(path))
        self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
        self._writer.start()

    @classmethod
    def open(
        cls, path: Path, *, durability: Literal["process", "power"] = "process", queued_bytes: int = QUEUED_BYTES
    ) -> Self:
        """Takes the run's lock and begins a life; makes the file where there is none.

        Args:
            durability: "process": a `kill -9` loses nothing that was committed. "power": neither does a power cut.
            queued_bytes: What may wait for the disk before `room` does.

        Raises RunLocked where another process has the run, JournalError where the file is damaged or foreign.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        held = lock.RunLock(path)
        try:
            connection = schema.connect(path, durability=durability)
            try:
                life, run_id = _begin(connection, path)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            held.release()
            raise
        return cls(path, connection, held, life, run_id, queued_bytes)

    def append(self, slot: int, *events: Event) -> None:
        """Writes events behind, all of them in one transaction. Raises JournalError once any write has failed."""
        self._put(Job(slot, events))

    async def durable(self, slot: int, *events: Event) -> None:
        """Returns when the events, and all that was appended before them, are on disk."""
        job = Job(slot, events)
        job.waiter = asyncio.get_running_loop().create_future()
        self._put(job)
        await job.waiter

    @property
    def end(self) -> int:
        """A place in the log, behind all that was put there; what lies before `written` is on disk."""
        return self._bytes_put

    @property
    def written(self) -> int:
        return self._bytes_written

    @property
    def queued(self) -> int:
        """Bytes that wait for the disk."""
        return self._bytes_put - self._bytes_written

    @property
    def writes(self) -> int:
        """How many writes wait for the disk, those that are being written among them."""
        return len(self._batch) + len(self._jobs)

    async def room(self) -> None:
        """Returns when little enough waits for the disk; whoever makes events waits for it, so that a slow disk slows
        down the episodes and not the growth of memory. Raises JournalError once any write has failed."""
        while self.queued > self._queued_bytes and self._failure is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._without_room.append(waiter)
            if self.queued > self._queued_bytes:  # else the writer may have looked before the waiter stood there
                await waiter
        if self._failure is not None:
            raise self._failure

    def submit(
        self,
        function: Callable[[sqlite3.Connection], T],
        *,
        slot: int = 0,
        events: Sequence[Event] = (),
        full: bool = False,
        afterwards: Callable[[sqlite3.Connection], Any] | None = None,
    ) -> Future[T]:
        """Runs `function` in the writer, in one transaction with `events`, after all that was appended before.

        An error of its own undoes its writes only; after one of another's it may be called a second time, on what was
        there before. With `full` the disk is flushed before the future is done, and `afterwards` runs between the two.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # whoever stops waiting does not undo the write
        job = Job(slot, events)
        job.function, job.full, job.afterwards, job.waiter = function, full, afterwards, future
        self._put(job)
        return future

    def submit_together(
        self,
        function: Callable[[sqlite3.Connection, list[A]], Sequence[T]],
        argument: A,
        slot: int,
        event: Event,
        told: Future[Any] | asyncio.Future[Any] | None = None,
    ) -> None:
        """As `submit`, for a function of many arguments at once, which looks at no event: those that are queued one
        after the other are done with one call, in one transaction with their events. `told` gets the result."""
        job = Job(slot, [event])
        job.together, job.argument, job.waiter = function, argument, told
        self._put(job)

    async def transact(self, function: Callable[[sqlite3.Connection], T], **how: Any) -> T:
        """`submit`, awaited."""
        return await asyncio.wrap_future(self.submit(function, **how))

    def flush(self) -> None:
        """Blocks until all that was appended is on disk."""
        self.submit(lambda connection: None).result()

    def close(self) -> None:
        """Writes what is queued, ends the life and gives the run's lock back. Raises JournalError if that failed."""
        if self._closed:
            return
        self._closed = True
        last = Job()
        last.function = lambda connection: lock.end_life(connection, self.life)
        self._jobs.append(last)
        self._last_batch = True
        self._hurry.set()
        self._some.set()
        self._writer.join()
        self._connection.close()
        self._lock.release()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A failure that is on its way already says more than the same one again.
        with contextlib.suppress(JournalError) if error is not None else contextlib.nullcontext():
            self.close()

    def _put(self, job: Job) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise JournalError(f"{self.path} is closed")
        self._bytes_put += job.size
        self._jobs.append(job)
        if job.waiter is not None and not self._hurry.is_set():
            self._hurry.set()
        if not self._some.is_set():
            self._some.set()

    def _write(self) -> None:
        """The writer: waits for jobs, is woken by the first, commits all that came while it was busy at once."""
        rest = _SHORT_LINGER
        while True:
            self._some.wait(lock.HEARTBEAT)
            if self._jobs and not self._last_batch:
                if not self._hurry.is_set():
                    self._hurry.wait(_LINGER)
                self._gather(rest)
            began = time.monotonic()
            last = self._last_batch
            # In this order: what is put after the jobs are taken sets the flags again.
            self._some.clear()
            self._hurry.clear()
            self._batch = [self._jobs.popleft() for _ in range(len(self._jobs))]
            self._commit(self._batch)
            self._batch = []
            rest = min(max(_REST * (time.monotonic() - began), _SHORT_LINGER), _LONGEST_REST)
            if last:
                return

    def _gather(self, seconds: float) -> None:
        """Lets more jobs come for as long. Where none does, whoever makes them may be waiting for those there are."""
        until = time.monotonic() + seconds
        known = 0
        while len(self._jobs) > known and time.monotonic() < until:
            known = len(self._jobs)
            time.sleep(max(seconds / _LOOKS, _SHORT_LINGER))

    def _commit(self, batch: list[Job]) -> None:
        outcomes: list[Outcome] = []
        if self._failure is None:
            try:
                outcomes = self._transaction(batch)
            except (sqlite3.Error, OSError) as error:
                self._failure = schema.damaged(self.path, error)
            except JournalError as error:
                self._failure = error
            except Exception as error:  # whatever it is, whoever waits has to hear of it
                self._failure = JournalError(f"{self.path} cannot be written: {type(error).__name__}: {error}")
        if self._failure is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            outcomes = [(job, None, self._failure) for job in batch]
        self.commits += 1
        self._bytes_written += sum([job.size for job in batch])
        if self._without_room and (self.queued <= self._queued_bytes or self._failure is not None):
            for _ in range(len(self._without_room)):
                told = Job()
                told.waiter = self._without_room.popleft()
                outcomes.append((told, None, None))
        tell(outcomes)

    def _transaction(self, batch: list[Job]) -> list[Outcome]:
        connection = self._connection
        # Almost no job is one of these; looking once costs half of what it costs to look for each of the three.
        special = [job for job in batch if job.blobs or job.full or job.afterwards is not None]
        for job in special:
            for digest, data in job.blobs.items():
                self.blobs.put(digest, data)
        full = not self._durable_always and any(job.full for job in special)
        if full:
            connection.execute("PRAGMA synchronous = FULL")
        try:
            self._begin_transaction()
            outcomes = run_together(connection, batch)
        except JobError:
            # So rare that no job pays for the precaution before one fails.
            connection.execute("ROLLBACK")
            self._begin_transaction()
            outcomes = [run_alone(connection, job) for job in batch]
        connection.execute("COMMIT")
        if full:
            connection.execute("PRAGMA synchronous = NORMAL")
        for job in special:
            if job.afterwards is not None:
                job.afterwards(connection)
        return outcomes

    def _begin_transaction(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        lock.check_lease(self._connection, self.life, self.path)
        if time.monotonic() - self._last_beat > lock.HEARTBEAT / 2:
            lock.beat(self._connection, self.life)
            self._place.check()
            self._last_beat = time.monotonic()


def _begin(connection: sqlite3.Connection, path: Path) -> tuple[int, str]:
    try:
        connection.execute("BEGIN IMMEDIATE")
        life = lock.begin_life(connection, path)
        connection.execute("INSERT OR IGNORE INTO run VALUES ('id', ?)", (secrets.token_hex(4),))
        run_id = connection.execute("SELECT value FROM run WHERE key = 'id'").fetchone()[0]
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise schema.damaged(path, error) from error
    return life, run_id


def read_events(connection: sqlite3.Connection, slot: int, blobs: BlobStore) -> list[Event]:
    """The events of one slot in order. Raises JournalError where one is damaged, naming it."""
    query = "SELECT id, kind, data, token_ids, logprobs, state, blob FROM events WHERE slot = ? ORDER BY id"
    events = []
    for number, *row in connection.execute(query, (slot,)):
        try:
            events.append(decode(Row(*row), blobs.get))
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(f"event {number} ({row[0]}) of slot {slot} is damaged: {error}") from error
    return events
