"""Function calls: what runs inside the program. The arguments come in, one typed data message goes out."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

from . import data, program
from .dialogue import Questions


def answer_calls(questions: Questions) -> None:
    """The first question is the code and what to call; its answer is empty when that is there."""
    opening = questions.next()
    if opening is None:
        return
    head, _, code = opening.partition(b"\n")
    wanted = json.loads(head)
    function, problem = _load(code, wanted["function"], wanted["cls"])
    questions.answer(problem)
    while (question := questions.next()) is not None:
        questions.answer(_call(function, question, code))


def _load(code: bytes, name: str, cls: str | None) -> tuple[Callable[..., Any], bytes]:
    # Not "__main__": the block that the guard protects is not part of the function.
    module = program.fresh_main("solution")
    sys.modules["solution"] = module
    try:
        compiled = compile(code, program.MAIN_FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        return _nothing, _problem("compile_error", error, code)
    try:
        exec(compiled, module.__dict__)
    except BaseException as error:
        return _nothing, _problem("runtime_error", error, code)
    owner = module.__dict__.get(cls) if cls else None
    target = getattr(owner, name, None) if cls else module.__dict__.get(name)
    if not callable(target):
        missing = f"{cls}.{name}" if cls else name
        return _nothing, _problem("runtime_error", NameError(f"the code defines no function {missing!r}"), code)
    # A new object for each call; a function is looked up anew, as it may have been wrapped since.
    return (lambda *args: getattr(owner(), name)(*args)) if cls else module.__dict__[name], b""  # type: ignore[misc]


def _call(function: Callable[..., Any], encoded: bytes, code: bytes) -> bytes:
    try:
        result = function(*data.loads(encoded))
        answer = b'{"value":' + data.dumps(result) + b"}"
    except BaseException as error:
        answer = _problem("runtime_error", error, code)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return answer


def _problem(kind: str, error: BaseException, code: bytes) -> bytes:
    if isinstance(error, MemoryError) and kind == "runtime_error":
        kind = "memory_limit"
    try:
        text = program.describe(error, code, program.MAIN_FILE)
    except BaseException:
        text = type(error).__name__
    return json.dumps({"status": kind, "error": text[-4000:]}).encode()


def _nothing() -> None:
    return None
