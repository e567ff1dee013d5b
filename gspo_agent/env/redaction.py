"""Secret values, kept out of everything that is written down or told to the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from gspo_agent.messages import Message, ToolCall

REDACTED = "[redacted]"
_SHORTEST = 4


def secret_values(tool_secrets: Iterable[str], arguments: Mapping[str, Any], env: object) -> tuple[str, ...]:
    """The values behind the names in `@tool(secrets=...)`: arguments of the call, or attributes of the environment.

    Values under four characters are left out: replacing them everywhere would garble honest text.
    """
    values = (arguments.get(name, getattr(env, name, None)) for name in tool_secrets)
    texts = (value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values if value)
    return tuple(text for text in texts if len(text) >= _SHORTEST)


def redact(value: Any, secrets: Iterable[str], names: Iterable[str] = ()) -> Any:
    """A copy of the JSON `value` without the texts in `secrets`; values of top-level keys in `names` go whole."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, list):
        return [redact(item, secrets) for item in value]
    if isinstance(value, dict):
        return {key: REDACTED if key in names else redact(item, secrets) for key, item in value.items()}
    return value


def redact_calls(message: Message, names: Mapping[str, Iterable[str]]) -> Message:
    """`message` with the secret arguments of its tool calls replaced; `names` are those of each tool."""
    calls: list[ToolCall] = []
    for call in message.get("tool_calls") or []:
        function: Any = call.get("function") or {}
        hidden = redact(function.get("arguments"), (), names.get(function.get("name"), ()))
        calls.append(cast(ToolCall, {**call, "function": {**function, "arguments": hidden}}))
    return {**message, "tool_calls": calls} if calls else message
