"""Programming tasks in the field's own formats, as tasks of a code environment.

{"id", "prompt", "kind": "stdio" | "call" | "test_code", "entry_point"?, "cls"?, "public_tests", "hidden_tests",
"time_limit"?, "test_code"?}; tests are {"stdin", "stdout"} or {"args", "expected"} as plain data
(`gspo_agent.sandbox.inside.data`). "cls" names the class whose method is called. "test_code" is Python source that
says what no list of calls can say; it is for an isolated judge, and a task of that kind has no lists of tests.
Where a format marks no visible tests, the first test is visible; hidden tests are all tests.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from typing import Any

from gspo_agent.sandbox.inside import data
from gspo_agent.tasks.asserts import call_tests, check_body, doctest_tests
from gspo_agent.tasks.rows import BadRow, json_field, list_field, text_field

_STDIO = "Read from standard input and write to standard output."
_MAX_UNPACKED = 1 << 30
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, EOFError, zlib.error, pickle.UnpicklingError)


def humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    """task_id, prompt, entry_point, test (a `check(candidate)`)."""
    stub, name, source = text_field(row, "prompt"), text_field(row, "entry_point"), text_field(row, "test")
    if not name.isidentifier():
        raise BadRow("entry_point", f"{name!r} is not a function's name")
    body = check_body(source)
    if body is None:
        raise BadRow("test", "has no function check(candidate)")
    task = _task(row, f"Complete this Python function.\n\n```python\n{stub.rstrip()}\n```", entry_point=name)
    found = call_tests(body, {"candidate", name})
    if found is None:
        return task | {"kind": "test_code", "test_code": f"{source.rstrip()}\n\ncheck({name})\n"}
    shown = doctest_tests(stub, name)
    return task | {"kind": "call", "public_tests": shown or found[1][:1], "hidden_tests": found[1]}


def mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    """task_id, text (or prompt), test_list, challenge_test_list, test_setup_code (or test_imports)."""
    statement = text_field(row, "text", "prompt").strip()
    asserts = [*list_field(row, "test_list"), *(row.get("challenge_test_list") or [])]
    if not asserts or not all(isinstance(line, str) for line in asserts):
        raise BadRow("test_list", "must hold asserts as text, at least one")
    task = _task(row, f"{statement}\n\nYour code should pass this test:\n{asserts[0].strip()}")
    found = call_tests("\n".join(line.strip() for line in asserts), set())
    if found is None:
        setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or [])]
        return task | {"kind": "test_code", "test_code": "\n".join([*filter(None, setup), *asserts]) + "\n"}
    name, tests = found
    return task | {"kind": "call", "entry_point": name, "public_tests": tests[:1], "hidden_tests": tests}


def livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    """question_content, starter_code, public_test_cases, private_test_cases (JSON, or packed), metadata."""
    statement = text_field(row, "question_content").strip()
    starter = text_field(row, "starter_code", empty=True) if row.get("starter_code") else ""
    public = _test_cases("public_test_cases", json_field("public_test_cases", row.get("public_test_cases") or "[]"))
    private = _test_cases("private_test_cases", _unpacked("private_test_cases", row.get("private_test_cases") or "[]"))
    if not public + private:
        raise BadRow("private_test_cases", "no test in it nor in public_test_cases")
    kinds = {case["testtype"] for case in public + private}
    if kinds == {"stdin"}:
        tests = [[{"stdin": case["input"], "stdout": case["output"]} for case in part] for part in (public, private)]
        task = _task(row, f"{statement}\n\n{_STDIO}", kind="stdio")
    elif kinds == {"functional"}:
        metadata = json_field("metadata", row.get("metadata") or "{}")
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        if not isinstance(name, str) or not name:
            raise BadRow("metadata", "has no func_name", "functional tests need the name of the function")
        tests = [[_functional(case) for case in part] for part in (public, private)]
        task = _task(row, _with_starter(statement, starter), kind="call", entry_point=name, **_class(starter))
    else:
        raise BadRow("public_test_cases", f"mixed kinds of tests {sorted(kinds)}")
    return task | {"public_tests": tests[0] or tests[1][:1], "hidden_tests": tests[0] + tests[1]}


def apps(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """question, input_output (JSON text: inputs, outputs, fn_name?), starter_code, time_limit; APPS and TACO."""
    statement = text_field(row, "question").strip()
    packed = row.get("input_output")
    if packed is None or packed == "":
        return None
    pairs = json_field("input_output", packed)
    if not isinstance(pairs, dict):
        raise BadRow("input_output", "is not an object with inputs and outputs")
    inputs, outputs = pairs.get("inputs"), pairs.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadRow("input_output", "inputs and outputs are not two lists of one length")
    if not inputs:
        return None
    starter = row.get("starter_code") or ""
    name = pairs.get("fn_name")
    if name:
        tests = _calls(inputs, outputs)
        task = _task(row, _with_starter(statement, starter), kind="call", entry_point=str(name), **_class(starter))
    else:
        tests = [
            {"stdin": _as_text("inputs", given), "stdout": _as_text("outputs", wanted)}
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
        task = _task(row, f"{statement}\n\n{_STDIO}", kind="stdio")
    limit = _time_limit(row.get("time_limit"))
    return task | {"public_tests": tests[:1], "hidden_tests": tests} | ({"time_limit": limit} if limit else {})


def _task(row: Mapping[str, Any], prompt: str, **fields: Any) -> dict[str, Any]:
    for name in ("task_id", "question_id", "problem_id", "id", "name"):
        if row.get(name) is not None:
            return {"id": str(row[name]), "prompt": prompt, **fields}
    return {"prompt": prompt, **fields}


def _with_starter(statement: str, starter: str) -> str:
    return f"{statement}\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```" if starter.strip() else statement


def _class(starter: str) -> dict[str, str]:
    match = re.search(r"^class\s+(Solution)\b", starter, re.MULTILINE)
    return {"cls": match[1]} if match else {}


def _test_cases(field: str, cases: Any) -> list[dict[str, str]]:
    if not isinstance(cases, list):
        raise BadRow(field, f"is {type(cases).__name__}, not a list of tests")
    for number, case in enumerate(cases):
        if not isinstance(case, dict) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise BadRow(field, f"test {number} has no input and output as text")
        if case.get("testtype") not in ("stdin", "functional"):
            raise BadRow(
                field, f"test {number} has testtype {case.get('testtype')!r}", "known are stdin and functional"
            )
    return cases


def _functional(case: Mapping[str, str]) -> dict[str, Any]:
    """One argument a line, as JSON."""
    args = [json_field("input", line) for line in case["input"].split("\n") if line.strip()]
    return {"args": data.encode(args), "expected": data.encode(json_field("output", case["output"]))}


def _calls(inputs: list[Any], outputs: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(given, list) for given in inputs):
        raise BadRow("input_output", "the inputs of a task with fn_name must be lists of arguments")
    # Published rows wrap each result in a list of one.
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for wanted in outputs)
    return [
        {"args": data.encode(given), "expected": data.encode(wanted[0] if wrapped else wanted)}
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _as_text(field: str, value: Any) -> str:
    """Text, or lines as some rows hold them."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(line.rstrip("\n") for line in value) + "\n"
    if not isinstance(value, str):
        raise BadRow("input_output", f"{field} hold {type(value).__name__}, not text")
    return value


def _time_limit(value: Any) -> float | None:
    """Seconds, from a number or "2.0 seconds"; what cannot be read is left to the environment's default."""
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:s|sec|secs|second|seconds)?\s*$", str(value or ""))
    return float(match[1]) or None if match else None


def _unpacked(field: str, value: Any) -> Any:
    """JSON, or base64 of zlib of a pickled JSON text, as LiveCodeBench publishes it."""
    if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
        return json_field(field, value)
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(value, validate=True), _MAX_UNPACKED)
        if not inflate.eof:
            raise BadRow(field, "is cut off, or unpacks to more than 1 GiB")
        text = raw.decode() if raw[:1] in (b"[", b"{") else _TextOnly(io.BytesIO(raw)).load()
        return json.loads(text)
    except _UNREADABLE as error:
        raise BadRow(field, f"is neither JSON nor base64 of zlib of JSON: {error}") from None


class _TextOnly(pickle.Unpickler):
    """A pickle can run anything when it is loaded; this one may hold plain data only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}; only text is allowed")
