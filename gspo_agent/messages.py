"""Message and ToolCall: the dicts that chat templates read."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class ToolFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict, total=False):
    """One call as the model wrote it. `error` is set, and `function` may be empty, where it could not be parsed."""

    id: str
    type: Literal["function"]
    function: ToolFunction
    error: str


class Message(TypedDict, total=False):
    """One message of a conversation. JSON only, so that a journal can hold it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
    outcome: Literal["ok", "error", "timeout", "interrupted"]
    """On a tool message: how the call went. Templates do not read it."""


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, tool_calls: list[ToolCall] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def call(name: str, /, **arguments: Any) -> ToolCall:
    """A well-formed tool call, as a scripted policy or a demonstration writes it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(
    content: str,
    *,
    name: str = "",
    call_id: str = "",
    outcome: Literal["ok", "error", "timeout", "interrupted"] = "ok",
) -> Message:
    return {"role": "tool", "content": content, "name": name, "tool_call_id": call_id, "outcome": outcome}
