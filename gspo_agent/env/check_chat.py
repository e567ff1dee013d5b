"""What a chat template has to be able to say about an environment: its prompt, its tools, its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gspo_agent.messages import Message, assistant, tool_result, user


class ChatLike(Protocol):
    """The part of `gspo_agent.chat.Chat` that is tried here; this room stands below that one."""

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]: ...

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int] | None: ...

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message: ...

    def conversation(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]: ...


def chat_breaches(chat: ChatLike, prompt: list[Message], tools: list[dict[str, Any]]) -> list[str]:
    """Renders the prompt, then one turn per tool as the model would write it, parses it and appends an answer."""
    breaches = []
    opened = chat.open(prompt, tools)
    turns = [(schema["function"]["name"], _call(schema["function"])) for schema in tools]
    for name, turn in [*turns, ("", assistant("The answer is 1."))]:
        what = f"a call of {name!r}" if name else "an answer"
        token_ids, written = chat.conversation([*prompt, turn], tools)
        if token_ids[: len(opened)] != opened:
            breaches.append(f"the prompt changes once {what} follows it")
            continue
        turn_ids = [id for id, mine in zip(token_ids, written, strict=True) if mine]
        parsed = chat.parse(turn_ids, tools)
        if not _same(parsed, turn):
            breaches.append(f"{what} is read back as {parsed!r:.200}, not {turn!r:.200}")
        reply = tool_result("1", name=name, call_id="0") if name else user("Go on.")
        if chat.extend(opened + turn_ids, len(opened), [reply], tools) is None:
            breaches.append(f"nothing can follow {what}: the template has no bridge to the next turn")
    return breaches


def _call(function: dict[str, Any]) -> Message:
    properties = function["parameters"].get("properties", {})
    arguments = {name: _value(schema) for name, schema in properties.items()}
    return assistant("", [{"type": "function", "function": {"name": function["name"], "arguments": arguments}}])


def _value(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    values = {"integer": 12, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return values.get(schema.get("type", ""), 'two\nlines, "quotes" and <tags>')


def _same(parsed: Message, turn: Message) -> bool:
    def calls(message: Message) -> list[Any]:
        return [made.get("function") for made in message.get("tool_calls") or [] if "error" not in made]

    return calls(parsed) == calls(turn) and (parsed.get("content") or "").strip() == (turn.get("content") or "").strip()
