"""Rows of files and data sets, read one by one, each with its place; every bad row is named, not only the first."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_agent.errors import TaskError

_SHOWN_ROWS = 20
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

logger = logging.getLogger(__name__)

Convert = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""A row -> a task; None where the format's own way says that the row has nothing to be judged by."""
Check = Callable[[dict[str, Any]], Any]
"""Raises ValueError with what is wrong with a task."""


class BadRow(Exception):
    """A row that cannot be used; becomes one line of a TaskError."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {problem}" + (f"; {remedy}" if remedy else ""))


def text_field(row: Mapping[str, Any], *names: str, empty: bool = False) -> str:
    """The first of `names` that the row has, as text."""
    for name in names:
        if name in row and row[name] is not None:
            if not isinstance(row[name], str):
                raise BadRow(name, f"is {type(row[name]).__name__}, not text")
            if not row[name].strip() and not empty:
                raise BadRow(name, "is empty", "remove the row or fill it in")
            return str(row[name])
    raise BadRow(names[0], "is missing", f"the row has {', '.join(map(repr, list(row)[:12])) or 'no fields'}")


def list_field(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    if value is None:
        raise BadRow(name, "is missing", f"the row has {', '.join(map(repr, list(row)[:12])) or 'no fields'}")
    if not isinstance(value, list):
        raise BadRow(name, f"is {type(value).__name__}, not a list")
    return value


def json_field(field: str, text: Any) -> Any:
    """A field that holds JSON as text; what is decoded already passes."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(field, f"is not JSON: {error}") from None


def convert_rows(
    rows: Iterator[tuple[str, Any]], convert: Convert, source: str, check: Check | None = None, *, drop: bool = False
) -> list[dict[str, Any]]:
    """Every row as a task that passes `check`. Raises one TaskError that names the first bad rows of all, with place
    and field, and how many there are; with `drop` that is a warning, and they are left out."""
    tasks: list[dict[str, Any]] = []
    bad: list[str] = []
    unjudged = 0
    for place, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, Mapping):
                raise BadRow("row", f"is {type(row).__name__}, not an object", "write one JSON object per task")
            task = convert(row)
            if task is not None and check is not None:
                _checked(check, task)
        except BadRow as problem:
            bad.append(f"{place}: {problem}")
            continue
        except (TypeError, ValueError, AttributeError) as problem:  # a field of a kind that no one foresaw
            bad.append(f"{place}: row: cannot be converted: {problem}")
            continue
        if task is None:
            unjudged += 1
        else:
            tasks.append(task)
    if bad:
        total = len(bad) + unjudged + len(tasks)
        more = [f"... and {len(bad) - _SHOWN_ROWS} more"] if len(bad) > _SHOWN_ROWS else []
        listed = "\n".join([*bad[:_SHOWN_ROWS], *more, f"{source}: {len(bad)} of {total} rows cannot be used"])
        if not drop or not tasks:
            leave_out = "" if drop else ', or write bad_tasks = "drop" in the [[env]] section'
            raise TaskError(f"{listed}; mend or remove them{leave_out}")
        logger.warning("%s, and are left out", listed)
    if unjudged:
        logger.warning("%s: %d of %d rows have no tests and are left out", source, unjudged, unjudged + len(tasks))
    if not tasks:
        raise TaskError(f"{source}: holds no tasks{' that have tests' if unjudged else ''}")
    return tasks


def _checked(check: Check, task: dict[str, Any]) -> None:
    try:
        check(task)
    except ValueError as problem:
        raise BadRow("task", str(problem)) from None


def read_path(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of a JSONL or JSON file, a folder of such files, or a data set saved by `datasets`."""
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            yield from _enumerate(str(path), _datasets().load_from_disk(str(path)))
            return
        files = [file for file in sorted(path.rglob("*")) if file.name.endswith(SUFFIXES)]
        if not files:
            raise TaskError(f"{path}: no {' or '.join(SUFFIXES)} file in this folder")
        for file in files:
            yield from read_path(file)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            if path.name.removesuffix(".gz").endswith(".json"):
                yield from _json_rows(path, opened.read())
            else:
                yield from json_lines(str(path), opened)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error


def read_hub(name: str, split: str) -> Iterator[tuple[str, Any]]:
    """Rows of a data set by its `datasets` name, written NAME, NAME:CONFIG or NAME:CONFIG@SPLIT."""
    where, _, own_split = name.partition("@")
    where, _, config = where.partition(":")
    try:
        rows = _datasets().load_dataset(where, config or None, split=own_split or split)
    except TaskError:
        raise
    except Exception as error:  # network, name, split: whatever the library raises
        raise TaskError(
            f"{name}: no such file, and `datasets` cannot load it: {' '.join(str(error).split())}; "
            f"write a path, or NAME:CONFIG@SPLIT"
        ) from error
    yield from _enumerate(name, rows)


def json_lines(place: str, file: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """(place, row) of every line of JSONL that is not empty."""
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield f"{place}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"{place}:{number}", BadRow("row", f"is not JSON: {error}", "write one JSON object per line")


def _json_rows(path: Path, raw: bytes) -> Iterator[tuple[str, Any]]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: is not JSON: {error}; name the file .jsonl if it holds one object per line") from None
    if isinstance(data, list):
        yield from ((f"{path}[{number}]", row) for number, row in enumerate(data))
    else:
        yield str(path), data


def _enumerate(name: str, rows: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(rows, Mapping):
        raise TaskError(f"{name}: holds the splits {', '.join(rows)}; name one folder, or NAME@SPLIT")
    yield from ((f"{name}[{number}]", row) for number, row in enumerate(rows))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise TaskError("data sets by name need the package `datasets`: pip install 'gspo_agent[data]'") from None
    return datasets
