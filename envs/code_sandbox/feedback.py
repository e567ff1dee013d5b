"""What the model reads about a visible test that failed: short, and nothing of the hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_agent.sandbox import readable
from gspo_agent.sandbox.inside import data
from rewards.unit_tests import TestVerdict

_PART_BYTES = 2000


def explain(task: Mapping[str, Any], test: Mapping[str, Any], verdict: TestVerdict) -> str:
    """The test, what the program made of it and what was expected; long parts keep their head and tail."""
    if verdict.verdict == "wrong_answer":
        return wrong_answer(task, test, verdict.output)
    error = verdict.error if verdict.verdict in ("runtime_error", "compile_error") else ""
    return "\n".join([_shown_input(task, test), _cut(error or verdict.reason)])


def explain_file(verdict: TestVerdict) -> str:
    """Of a test file: what pytest says of the first test that failed."""
    return _cut("\n".join(filter(None, [f"failed: {verdict.reason}", verdict.error])))


def wrong_answer(task: Mapping[str, Any], test: Mapping[str, Any], output: str) -> str:
    """`output` is what was printed, or the repr of what was returned."""
    call = task["kind"] == "call"
    expected = repr(data.decode(test["expected"])) if call else _text(test["stdout"])
    gap = " " if call else ":\n"
    return f"{_shown_input(task, test)}\ngot{gap}{_cut(output)}\nexpected{gap}{_cut(expected)}"


def _shown_input(task: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    if task["kind"] == "call":
        arguments = ", ".join(map(repr, data.decode(test["args"])))
        return f"failed: {_cut(task['entry_point'] + '(' + arguments + ')')}"
    return f"failed on the input:\n{_cut(_text(test['stdin']))}"


def _text(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def _cut(text: str) -> str:
    return readable(text.encode("utf-8", "replace"), _PART_BYTES).strip("\n")
