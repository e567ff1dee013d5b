"""Jobs of one batch: in order, each with its own error, whatever is written together."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from gspo_agent.rollout import schema
from gspo_agent.rollout.events import CallBegun, Observed
from gspo_agent.rollout.jobs import Job, JobError, insert, run_alone, run_together, tell, value_lists


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with sqlite3.connect(":memory:", isolation_level=None) as connection:
        connection.executescript(schema.TABLES)
        yield connection
    connection.close()


def begun(number: int) -> CallBegun:
    return CallBegun(f"{number}", "f", {})


def slots(connection: sqlite3.Connection) -> list[int]:
    return [slot for (slot,) in connection.execute("SELECT slot FROM events ORDER BY id")]


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 512, 513, 1200])
def test_rows_keep_their_order_however_many_there_are(connection: sqlite3.Connection, number: int) -> None:
    run_together(connection, [Job(slot, [begun(slot)]) for slot in range(number)])
    assert slots(connection) == list(range(number))


def test_statements_for_however_many_rows_are_few_and_of_few_sizes() -> None:
    tables = [list(value_lists([(n, -n) for n in range(1, number + 1)])) for number in range(1100)]
    for number, parts in enumerate(tables):
        found = [value for _, arguments, rows in parts for value in arguments[: 2 * rows : 2]]
        assert found == list(range(1, number + 1))
        assert len(parts) == math.ceil(number / 512)
        assert not any(value for _, arguments, rows in parts for value in arguments[2 * rows :])
    assert len({table for parts in tables for table, _, _ in parts}) == 7


def test_new_rows_ids_are_in_their_order(connection: sqlite3.Connection) -> None:
    columns = "slots (group_id, number, attempt, seed, state)"
    for first, number in ((1, 3), (4, 600), (604, 1)):
        rows = [(first, n, 0, n + 5, "waiting") for n in range(number)]
        ids = insert(connection, columns, rows)
        assert list(ids) == list(range(first, first + number))
        found = connection.execute("SELECT seed FROM slots WHERE group_id = ? ORDER BY id", (first,)).fetchall()
        assert found == [(row[3],) for row in rows]


def test_what_is_empty_and_what_is_not_there_are_two_things(connection: sqlite3.Connection) -> None:
    run_together(connection, [Job(1, [Observed(0, [], ())]), Job(1, [Observed(0, [], None)])])
    assert connection.execute("SELECT token_ids, state FROM events ORDER BY id").fetchall() == [
        (b"", None),
        (None, None),
    ]


def test_a_function_sees_what_was_put_before_it(connection: sqlite3.Connection) -> None:
    look = Job(3, [begun(3)])
    look.function = slots
    outcomes = run_together(connection, [Job(1, [begun(1)]), Job(2, [begun(2)]), look, Job(4, [begun(4)])])
    assert [(job, result) for job, result, _ in outcomes] == [(look, [1, 2, 3])]
    assert slots(connection) == [1, 2, 3, 4]


def asked(function: Callable[[sqlite3.Connection, list[Any]], Sequence[Any]], argument: Any) -> Job:
    job = Job(argument, [begun(argument)])
    job.together, job.argument = function, argument
    return job


def test_what_may_be_done_together_is_done_with_one_call_and_in_order(connection: sqlite3.Connection) -> None:
    """Rows in between do not part it; another function does."""
    calls: list[tuple[str, list[Any]]] = []

    def double(connection: sqlite3.Connection, arguments: list[Any]) -> list[Any]:
        calls.append(("double", arguments))
        return [2 * argument for argument in arguments]

    def negate(connection: sqlite3.Connection, arguments: list[Any]) -> list[Any]:
        calls.append(("negate", arguments))
        return [-argument for argument in arguments]

    look = Job()
    look.function = slots
    jobs = [asked(double, 1), Job(2, [begun(2)]), asked(double, 3), asked(negate, 4), asked(double, 5), look]
    outcomes = run_together(connection, [*jobs, asked(double, 6)])
    assert [result for _, result, _ in outcomes] == [2, 6, -4, 10, [1, 2, 3, 4, 5], 12]
    assert calls == [("double", [1, 3]), ("negate", [4]), ("double", [5]), ("double", [6])]
    assert slots(connection) == [1, 2, 3, 4, 5, 6]


def test_the_error_of_one_job_undoes_that_job_and_no_other(connection: sqlite3.Connection) -> None:
    def refuse(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO run VALUES ('a', 'b')")
        raise KeyError("no")

    failing = Job(2, [begun(2)])
    failing.function = refuse
    batch = [Job(1, [begun(1)]), failing, Job(3, [begun(3)])]
    connection.execute("BEGIN")
    with pytest.raises(JobError):
        run_together(connection, batch)
    connection.execute("ROLLBACK")
    connection.execute("BEGIN")
    errors = [type(error) for _, _, error in (run_alone(connection, job) for job in batch)]
    connection.execute("COMMIT")
    assert errors == [type(None), KeyError, type(None)]
    assert slots(connection) == [1, 3]
    assert connection.execute("SELECT count(*) FROM run").fetchone() == (0,)


def test_what_is_done_to_an_event_later_is_not_written(connection: sqlite3.Connection) -> None:
    arguments = {"number": 1}
    job = Job(1, [CallBegun("a", "f", arguments)])
    arguments["number"] = 2
    run_together(connection, [job])
    assert b'"number":1' in connection.execute("SELECT data FROM events").fetchone()[0]


async def test_who_waits_hears_in_the_order_of_the_jobs_however_it_waits() -> None:
    """An end, and a look at all that have ended: who hears of the look first would take the end for a later one."""
    heard: list[int] = []
    loop = asyncio.get_running_loop()
    jobs = [Job() for _ in range(6)]
    waiters: list[asyncio.Future[int]] = []
    for number, job in enumerate(jobs):
        if number % 3:
            job.waiter = Future()
            waiters.append(asyncio.wrap_future(job.waiter))
        else:
            job.waiter = loop.create_future()
            waiters.append(job.waiter)
        waiters[-1].add_done_callback(lambda done: heard.append(done.result()))
    await asyncio.to_thread(tell, [(job, number, None) for number, job in enumerate(jobs)])
    await asyncio.gather(*waiters)
    assert heard == list(range(6))
