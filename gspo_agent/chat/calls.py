"""Tool calls as the model wrote them: fit to run, or with an error that the model can read."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from gspo_agent.messages import ToolCall

FORMAT_HINT = 'write <tool_call>, then {"name": ..., "arguments": {...}}, then </tool_call>'
_SHOWN_CHARS = 200
_strict_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_HERMES = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|\Z)", re.DOTALL)


def make_call(name: Any, arguments: Any, raw: str = "") -> ToolCall:
    """A call to run, or, where name or arguments cannot be used, one with `error`."""
    if not isinstance(name, str) or not name:
        return broken_call("the tool call has no name", raw)
    name = name.encode("utf-8", "replace").decode()
    if not isinstance(arguments, dict):
        return broken_call(f"the arguments of {name} are not an object but {type(arguments).__name__}", raw, name)
    try:
        _strict_json([name, arguments])
        orjson.dumps([name, arguments])
    except (ValueError, TypeError, RecursionError) as error:
        # NaN, lone surrogates, endless nesting, numbers past 64 bits: the journal could not keep them, and an episode
        # that fails is sampled again, which a policy could learn to bring about.
        return broken_call(f"the arguments of {name} cannot be used: {_line(str(error))}", raw, name)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def broken_call(problem: str, raw: str, name: Any = "") -> ToolCall:
    shown = _line(raw)
    return {
        "type": "function",
        "function": {"name": name if isinstance(name, str) else "", "arguments": {}},
        "error": f"{problem}{f': {shown}' if shown else ''}; {FORMAT_HINT}",
    }


def spoil(call: ToolCall, problem: str, raw: str) -> ToolCall:
    """`call`, not to be run."""
    return call if "error" in call else broken_call(problem, raw, call["function"]["name"])


def split_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """What stands before the first `<tool_call>`, and every call."""
    content, end = text, -1
    calls: list[ToolCall] = []
    for match in _HERMES.finditer(text):
        if not calls:
            content = text[: match.start()]
        elif text[end : match.start()].strip():
            calls[-1] = spoil(calls[-1], "there is text after the tool call", text[end : match.start()])
        calls.append(
            _hermes_call(match[1].strip()) if match[2] else broken_call("the tool call is not closed", match[1])
        )
        end = match.end()
    if calls and text[end:].strip():
        calls[-1] = spoil(calls[-1], "there is text after the tool call", text[end:])
    return content.strip(), calls


def _hermes_call(body: str) -> ToolCall:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        return broken_call(f"the tool call is not valid JSON ({_line(str(error))})", body)
    if not isinstance(parsed, dict):
        return broken_call("the tool call is not a JSON object", body)
    return make_call(parsed.get("name"), parsed.get("arguments", {}), body)


def _line(text: str) -> str:
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " ..."
