"""The cases of tests/cases/sandbox.json, with their generated texts filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "cases" / "sandbox.json"


def load() -> list[dict[str, Any]]:
    """Every case. Groups `limits` and `escape` are never to be run unconfined."""
    return [_generated(case) for case in json.loads(FILE.read_text())["cases"]]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [case for case in load() if case["kind"] == kind]


def tests_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """As `rewards.unit_tests.judge` takes them."""
    if case["kind"] == "testfile":
        return [{key: case[key] for key in ("test_file", "module", "count") if key in case}]
    return list(case["tests"])


def _generated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _generated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_generated(item) for item in value]
    # Our own expressions, in our own file.
    return eval(value.removeprefix("GEN:")) if isinstance(value, str) and value.startswith("GEN:") else value
