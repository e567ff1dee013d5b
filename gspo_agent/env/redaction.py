"""Secret values, kept out of everything that is written down or told to the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from gspo_agent.messages import Message

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


def redact_message(message: Message, names: Mapping[str, Iterable[str]], env: object) -> Message:
    """An assistant's message without secret values, in its calls and around them; `names` are those of each tool.

    A call that could not be parsed stays as it is: where in it a secret stands cannot be told.
    """
    calls: list[Any] = list(message.get("tool_calls") or [])
    secrets: set[str] = set()
    for tool, hidden in names.items():
        secrets.update(secret_values(hidden, {}, env))
        for function in (call.get("function") or {} for call in calls):
            if function.get("name") == tool and isinstance(function.get("arguments"), dict):
                secrets.update(secret_values(hidden, function["arguments"], env))
    longest_first = sorted(secrets, key=len, reverse=True)
    shown = dict(redact({key: value for key, value in message.items() if key != "tool_calls"}, longest_first))
    if calls:
        shown["tool_calls"] = [_redact_call(call, names, longest_first) for call in calls]
    return cast(Message, shown)


def _redact_call(call: Any, names: Mapping[str, Iterable[str]], secrets: Iterable[str]) -> Any:
    function: Any = call.get("function") or {}
    arguments = redact(function.get("arguments"), secrets, names.get(function.get("name"), ()))
    return {**call, "function": {**function, "arguments": arguments}}
