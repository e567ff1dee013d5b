"""The table of what is asked of SGLang says what the code does."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import orjson

import gspo_agent.engine
from gspo_agent.engine.base import Sampling
from gspo_agent.engine.request import Asked

ENGINE = Path(gspo_agent.engine.__file__).parent
TABLE = ENGINE / "SGLANG.md"
ROUTE = re.compile(r"(?:/[a-z0-9_]+)+")
READERS = {"get": "GET", "post": "POST", "_get_either": "GET", "_answers": "GET"}


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([^`/]+)`", cell))


def table(routers: bool = False) -> dict[str, tuple[set[str], set[str]]]:
    """Call -> what is sent, what is read."""
    rows = {}
    for part in TABLE.read_text().split("\nOf a router")[routers : routers + 1]:
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| `"):
                rows[cells[0].strip("`")] = (words(cells[1]), words(cells[2]))
    return rows


def functions() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in sorted(ENGINE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def routes_of(call: ast.Call) -> list[str]:
    texts = [node.value for arg in call.args for node in ast.walk(arg) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and ROUTE.fullmatch(text)]


def fields_of(call: ast.Call, names: dict[str, ast.Dict]) -> tuple[set[str], bool]:
    """Of the body that is given with a call, and whether those are all."""
    fields: set[str] = set()
    whole = True
    for arg in call.args:
        found = names.get(arg.id) if isinstance(arg, ast.Name) else None
        for node in [found] if found else [node for node in ast.walk(arg) if isinstance(node, ast.Dict)]:
            fields |= {key.value for key in node.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
            whole &= None not in node.keys
    return fields, whole


def called() -> tuple[dict[str, set[str]], set[str]]:
    """Call -> the fields that the code sends; and the calls of which it says all fields."""
    sent: dict[str, set[str]] = defaultdict(set)
    whole = set()
    for function in functions():
        names = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Dict)
        }
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name not in READERS and name != "_call":
                continue
            for route in routes_of(call):
                line = f"{READERS.get(name, 'POST')} {route}"
                fields, all_of_them = fields_of(call, names)
                sent[line] |= fields
                whole |= {line} if all_of_them else set()
    return sent, whole


def body() -> dict[str, dict[str, object]]:
    asked = Asked("r", Sampling(8, seed=1), 8, "policy", 0, adapter="a")
    made: dict[str, dict[str, object]] = orjson.loads(asked.body([1], namespace="n", stream=True))
    return made


def test_every_call_is_in_the_table_and_every_row_is_called() -> None:
    sent, whole = called()
    rows = table()
    assert sent.keys() - {"GET /workers"} == rows.keys()
    for line, fields in sent.items():
        if line in ("GET /workers", "POST /generate"):
            continue
        assert fields <= rows[line][0], line
        if line in whole:
            assert fields == rows[line][0], line


def test_what_is_sent_with_a_request_is_in_the_table() -> None:
    assert table()["POST /generate"][0] == body().keys()
    sentence = TABLE.read_text().split("Of `sampling_params` are sent:")[1].split("\n\n")[0]
    assert words(sentence) == body()["sampling_params"].keys() | {"ignore_eos"}


def test_what_is_asked_of_a_router_is_in_the_table() -> None:
    source = (ENGINE / "router.py").read_text()
    rows = table(routers=True)
    told = re.findall(r'_tell\("(\w+)", f?"(/workers[^"]*)"', source)
    lines = {f"{method} {re.sub('{.*}', '{id}', path)}" for method, path in told} | {"GET /workers", "POST /generate"}
    assert lines == rows.keys()


def test_what_is_read_is_in_the_table() -> None:
    said = (ENGINE / "worker.py").read_text()
    assert set(re.findall(r'\binfo\.get\("(\w+)"', said)) - {"weight_version"} == table()["GET /server_info"][1]
    model = set(re.findall(r"""\bmodel\.get\(["'](\w+)""", said)) | {"weight_version"}
    assert model == table()["GET /model_info"][1]
    replies = "".join((ENGINE / name).read_text() for name in ("reply.py", "stream.py"))
    meta = {f"meta_info.{field}" for field in re.findall(r'\bmeta(?:\.get\(|\[)"(\w+)"', replies)}
    assert meta | {"output_ids"} == table()["POST /generate"][1]
