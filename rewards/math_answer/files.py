"""Answers judged from the command line (`gspo-agent verify`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gspo_agent.tasks.rows import BadRow, text_field
from rewards.judging import case_rows
from rewards.math_answer.verdict import Options, Verdict, verify
from rewards.math_answer.workers import Workers

_OPTIONS = {field.name: field.type for field in fields(Options)}


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    id: str
    text: str
    gold: str
    options: dict[str, Any]


async def verify_file(path: Path | None, *, text: str = "", gold: str = "", anchors: bool = True) -> int:
    """Prints one JSON object for each row as soon as it is judged, and on standard error the rows that cannot be used
    and the count of each reason. Without a file, `text` is the one row. Returns how many rows or gold answers cannot be
    used."""
    rows = list(case_rows(path)) if path else [("text", {"text": text, "gold": gold})]
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    counts: Counter[str] = Counter()
    undecided: list[Case] = []
    bad = 0

    def printed(case: Case, verdict: Verdict) -> None:
        counts[verdict.reason] += 1
        sys.stdout.write(json.dumps(_line(case, verdict)) + "\n")
        progress.advance(bar)

    columns = (TextColumn("verified"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(rows))
        for place, row in rows:
            try:
                case = _case(place, row, anchors)
            except BadRow as problem:
                bad += 1
                console.print(f"{place}: {problem}")
                progress.advance(bar)
                continue
            verdict = verify(case.text, case.gold, **case.options)
            if verdict.reason == "undecided":
                undecided.append(case)
            else:
                printed(case, verdict)
            await asyncio.sleep(0)
        await _asked(undecided, printed)
    sys.stdout.flush()
    said = [f"{reason} {count}" for reason, count in counts.most_common()]
    console.print(", ".join([f"{counts.total()} verified", *said, *([f"rows that cannot be used {bad}"] * (bad > 0))]))
    return bad + counts["gold_invalid"]


async def _asked(cases: list[Case], printed: Any) -> None:
    """What the parser left undecided, by the workers."""
    if not cases:
        return

    async def one(case: Case) -> None:
        printed(case, await workers.verify(case.text, case.gold, **case.options))

    async with Workers(size=len(os.sched_getaffinity(0))) as workers, asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(one(case))


def _case(place: str, row: Any, anchors: bool) -> Case:
    """BadRow names the field."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("row", f"is {type(row).__name__}, not an object", "write one JSON object per answer")
    text = _text(row) if row.get("text_parts") is not None else text_field(row, "text", empty=True)
    asked = row.get("opts") or {}
    if not isinstance(asked, Mapping):
        raise BadRow("opts", f"is {type(asked).__name__}, not an object")
    options = {"anchors": anchors} | {name: row[name] for name in _OPTIONS if name in row} | dict(asked)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise BadRow("opts", f"unknown option {unknown[0]!r}", f"there is {', '.join(_OPTIONS)}")
    for name, value in options.items():
        _checked(name, value)
    return Case(str(row.get("id", place)), text, text_field(row, "gold", empty=True), options)


def _text(row: Mapping[str, Any]) -> str:
    """text_parts: [text, how many times] one after another."""
    parts = row["text_parts"]
    try:
        return "".join(part * times for part, times in parts)
    except (TypeError, ValueError):
        raise BadRow("text_parts", "is not a list of [text, times]") from None


def _checked(name: str, value: Any) -> None:
    right = {
        "anchors": isinstance(value, bool),
        "multi": isinstance(value, bool),
        "decimals": isinstance(value, bool),
        "choices": isinstance(value, str),
        "answer_type": value in (None, "choice", "math"),
        "rel_tol": isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1,
    }
    if not right[name]:
        raise BadRow(name, f"is {value!r}, which it cannot be")


def _line(case: Case, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": case.id,
        "correct": verdict.correct,
        "reason": verdict.reason,
        "extracted": verdict.extracted,
        "path": verdict.path,
        "ms": round(verdict.ms, 3),
    }
