"""A file of solutions and their tests, judged from the command line (`gspo-agent judge`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gspo_agent.errors import ConfigError, GspoAgentError, TaskError
from gspo_agent.sandbox import Sandbox, SandboxLimits, SandboxSettings
from gspo_agent.tasks.rows import BadRow, json_lines, read_path, text_field
from rewards.unit_tests import Verdict, judge

_MARK = "GEN:"  # of texts that are written as a Python expression
_CALCULATE = "def value(expression): return eval(expression)"
_GENERATED = SandboxLimits(result_bytes=64 << 20)
_DAY_S = 86400
_AHEAD = 4  # rows per processor that wait for their turn in the sandbox


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    place: str
    id: str
    code: str
    tests: list[Any]
    options: dict[str, Any]


async def judge_file(path: Path, backend: str = "auto") -> int:
    """Prints one JSON object for each row as soon as it is judged, and on standard error the rows that cannot be used
    and the count of each verdict. Waits for all; returns how many rows could not be used."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    counts: Counter[str] = Counter()
    bad = 0
    places = asyncio.Semaphore(_AHEAD * len(os.sched_getaffinity(0)))

    async def judged(place: str, row: Any) -> None:
        nonlocal bad
        try:
            case = await _case(place, row, sandbox)
            line = _line(case, await judge(case.code, case.tests, sandbox=sandbox, **case.options))
        except (BadRow, ConfigError) as problem:
            bad += 1
            console.print(f"{place}: {problem}")
        else:
            counts[line["verdict"]] += 1
            _say(json.dumps(line))
        progress.advance(bar)
        places.release()

    columns = (TextColumn("judged"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    settings = SandboxSettings(backend=cast(Any, backend))
    async with await Sandbox.open(settings) as sandbox:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=None)  # a file may be longer than memory
            async with asyncio.TaskGroup() as group:
                rows = case_rows(path)
                # In a thread: a pipe may have its next row much later, and verdicts are waited for meanwhile.
                while (found := await asyncio.to_thread(next, rows, None)) is not None:
                    await places.acquire()
                    group.create_task(judged(*found))
    if not counts and not bad:
        raise TaskError(f"{path}: holds no rows; write one JSON object per solution")
    said = [f"{verdict} {count}" for verdict, count in counts.most_common()]
    console.print(", ".join([f"{counts.total()} judged", *said, *([f"rows that cannot be used {bad}"] * (bad > 0))]))
    return bad


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it would be an error once more
        raise GspoAgentError(f"standard output cannot be written: {error.strerror}") from None


def case_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row); a JSON object with `cases` is the list of these. The path "-" is the lines of standard input."""
    rows = json_lines("standard input", sys.stdin.buffer) if str(path) == "-" else read_path(path)
    for place, row in rows:
        if isinstance(row, Mapping) and isinstance(row.get("cases"), list):
            yield from ((f"{place}[{number}]", case) for number, case in enumerate(row["cases"]))
        else:
            yield place, row


async def _case(place: str, row: Any, sandbox: Sandbox) -> Case:
    """BadRow names the field."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("row", f"is {type(row).__name__}, not an object", "write one JSON object per solution")
    if row.get("kind") == "session":
        raise BadRow("kind", "is 'session', which has cells and no verdict")
    row = await _generated(row, sandbox)
    code = text_field(row, "solution", "code", empty=True)
    entry_point, cls = _name(row, "entry_point", "fn"), _name(row, "cls")
    tests = row.get("tests", row.get("test_file"))
    kind = row.get("kind") or ("testfile" if isinstance(tests, str) else "call" if entry_point else "stdio")
    if isinstance(tests, str):
        tests = [{"test_file": tests, **{key: row[key] for key in ("module", "count") if row.get(key) is not None}}]
    if not isinstance(tests, list) or not all(isinstance(test, Mapping) for test in tests):
        raise BadRow("tests", "is neither a list of objects nor the source of a test file")
    options: dict[str, Any] = {"kind": kind, "limits": _limits(row)}
    if kind != "testfile":
        # Its two names for what is our default.
        compare = row.get("compare") if kind == "call" and row.get("compare") != "value" else None
        options |= {"entry_point": entry_point, "cls": cls, "compare": compare}
    return Case(place, str(place if row.get("id") is None else row["id"]), code, tests, options)


def _name(row: Mapping[str, Any], *fields: str) -> str | None:
    found = next((row[field] for field in fields if row.get(field) is not None), None)
    if found is not None and not isinstance(found, str):
        raise BadRow(fields[0], f"is {type(found).__name__}, not a name")
    return found


def _limits(row: Mapping[str, Any]) -> SandboxLimits:
    seconds = row.get("time_limit")
    if seconds is None:
        return SandboxLimits()
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < _DAY_S:
        raise BadRow("time_limit", f"is {seconds!r}, not CPU seconds above 0 and below {_DAY_S}")
    return SandboxLimits(cpu_s=float(seconds), wall_s=3 * float(seconds) + 5)


async def _generated(row: Mapping[str, Any], sandbox: Sandbox) -> Any:
    """The row with its generated texts; their expressions are code like any other, and run isolated."""
    found: dict[str, Any] = {}
    _collect(row, found)
    if not found:
        return row
    results = await sandbox.call_many(_CALCULATE, "value", [[text[len(_MARK) :]] for text in found], limits=_GENERATED)
    for text, result in zip(found, results, strict=True):
        if result.status != "ok":
            raise BadRow(text[:40], f"cannot be generated: {result.error or result.status}")
        found[text] = result.value
    return _replaced(row, found)


def _collect(value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, str) and value.startswith(_MARK):
        found[value] = None
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            _collect(item, found)


def _replaced(value: Any, found: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item, found) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, found) for item in value]
    return found.get(value, value) if isinstance(value, str) else value


def _line(case: Case, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": case.id,
        "verdict": verdict.verdict,
        "passed": verdict.passed,
        "total": verdict.total,
        "reason": verdict.reason,
        "ms": round(sum(test.ms for test in verdict.tests), 1),  # without the time in which it waited for its turn
    }
