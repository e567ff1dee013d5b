"""Answers judged from the command line (`gspo-agent verify`)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gspo_agent.tasks.rows import BadRow, text_field
from rewards.judging import case_rows
from rewards.math_answer.verdict import OPTIONS, UNSCORED, Options, Verdict, judge_text
from rewards.math_answer.workers import Workers, need_math_verify

_SHOWN_ROWS = 20
_AHEAD = 64  # rows that wait for a worker, each in a thread
_MAX_CHARACTERS = 100_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    id: str
    text: str
    gold: str
    options: Options


async def verify_file(
    path: Path | None, *, text: str = "", gold: str = "", anchors: bool = True, second_opinion: bool = False
) -> int:
    """Prints one JSON object for each row as soon as it is judged, and on standard error the first rows that cannot be
    used and the count of each reason. Without a file, `text` is the one row. Returns how many rows got no verdict:
    they, or their gold answers, cannot be used, or no worker could tell."""
    if second_opinion:
        need_math_verify()
    defaults = {"anchors": anchors, "second_opinion": second_opinion}
    rows = list(case_rows(path)) if path else [("text", {"text": text, "gold": gold})]
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    counts: Counter[str] = Counter()
    undecided: list[Case] = []
    bad = 0

    def printed(case: Case, verdict: Verdict) -> None:
        counts[verdict.reason] += 1
        sys.stdout.write(json.dumps(_line(case, verdict)) + "\n")
        sys.stdout.flush()
        progress.advance(bar)

    columns = (TextColumn("verified"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(rows))
        for place, row in rows:
            try:
                case = _case(place, row, defaults)
            except BadRow as problem:
                bad += 1
                if bad <= _SHOWN_ROWS:
                    console.print(f"{place}: {problem}")
                progress.advance(bar)
                continue
            verdict, _ = judge_text(case.text, case.gold, case.options)
            if verdict.reason == "undecided":
                undecided.append(case)
            else:
                printed(case, verdict)
            await asyncio.sleep(0)
        places = asyncio.Semaphore(_AHEAD)
        with Workers() as workers:
            for done in asyncio.as_completed([_asked(workers, places, case) for case in undecided]):
                printed(*await done)
    said = [f"{reason} {count}" for reason, count in counts.most_common()]
    console.print(", ".join([f"{counts.total()} verified", *said, *([f"rows that cannot be used {bad}"] * (bad > 0))]))
    return bad + sum(counts[reason] for reason in UNSCORED)


async def _asked(workers: Workers, places: asyncio.Semaphore, case: Case) -> tuple[Case, Verdict]:
    async with places:
        return case, await workers.verify(case.text, case.gold, case.options)


def _case(place: str, row: Any, defaults: Mapping[str, Any]) -> Case:
    """BadRow names the field."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("row", f"is {type(row).__name__}, not an object", "write one JSON object per answer")
    text = _text(row) if row.get("text_parts") is not None else text_field(row, "text", empty=True)
    asked = row.get("opts") or {}
    if not isinstance(asked, Mapping):
        raise BadRow("opts", f"is {type(asked).__name__}, not an object")
    if unknown := sorted(set(asked) - set(OPTIONS)):
        raise BadRow("opts", f"unknown option {unknown[0]!r}", f"there is {', '.join(OPTIONS)}")
    try:
        options = Options.of({**defaults, **row, **asked})
    except ValueError as problem:
        raise BadRow("row", str(problem)) from None
    gold = row.get("gold")
    if isinstance(gold, int) and not isinstance(gold, bool):
        gold = str(gold)
    name = place if row.get("id") is None else str(row["id"])
    return Case(name, text, text_field({**row, "gold": gold}, "gold", empty=True), options)


def _text(row: Mapping[str, Any]) -> str:
    """text_parts: [text, how many times] one after another."""
    parts = row["text_parts"]
    try:
        if sum(len(part) * times for part, times in parts) > _MAX_CHARACTERS:
            raise BadRow("text_parts", f"are more than {_MAX_CHARACTERS:,} characters", "repeat less")
        return "".join(part * times for part, times in parts)
    except (TypeError, ValueError):
        raise BadRow("text_parts", "is not a list of [text, times]") from None


def _line(case: Case, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": case.id,
        "correct": verdict.correct,
        "reason": verdict.reason,
        "extracted": verdict.extracted,
        "path": verdict.path,
        "ms": round(verdict.ms, 3),
    }
