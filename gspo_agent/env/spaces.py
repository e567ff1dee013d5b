"""Gymnasium spaces of conversations: observations are lists of messages, actions are assistant messages."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Space

from gspo_agent.errors import EnvError
from gspo_agent.messages import Message, user

_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def is_message(value: Any, *roles: str) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in (roles or ("system", "user", "assistant", "tool"))
        and isinstance(value.get("content", ""), str)
    )


def as_messages(said: Any, hook: str) -> list[Message]:
    """What an author's hook says, as one user message's text or as a list of messages. Raises EnvError."""
    messages = [user(said)] if isinstance(said, str) else list(said) if isinstance(said, list) else []
    if not messages or not all(is_message(message) for message in messages):
        raise EnvError(f"{hook} returned {said!r:.80}; return text or a list of messages")
    return messages


class MessageList(Space[list[Message]]):
    """Any number of messages, none of them the assistant's own after the prompt."""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def contains(self, x: Any) -> bool:
        return isinstance(x, list) and all(is_message(message) for message in x)

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        return [{"role": "user", "content": _text(self)}]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageList)

    __hash__ = Space.__hash__

    def __repr__(self) -> str:
        return "MessageList()"


class AssistantMessage(Space[Message]):
    """One assistant message. A sample is plain text without a tool call."""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def contains(self, x: Any) -> bool:
        return is_message(x, "assistant") and isinstance(x.get("tool_calls") or [], list)

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        return {"role": "assistant", "content": _text(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AssistantMessage)

    __hash__ = Space.__hash__

    def __repr__(self) -> str:
        return "AssistantMessage()"


def _text(space: Space[Any]) -> str:
    length = int(space.np_random.integers(1, 40))
    return "".join(_LETTERS[i] for i in space.np_random.integers(0, len(_LETTERS), length))
