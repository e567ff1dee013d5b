"""ByteChat: a chat whose tokens are bytes, with a few ids above 255 as its marks; text can never become one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gspo_agent.messages import Message, ToolCall


class ByteChat:
    """Implements `gspo_agent.chat.Chat` without a tokenizer or a template.

    A message is its role's mark, its UTF-8 bytes and END; a tool call inside a turn stands between CALL and CALL_END as
    JSON. A turn that does not end with END has no bridge.

    >>> chat = ByteChat()
    >>> prompt = chat.open([user("hi")], [])
    >>> chat.parse(chat.turn("bye"), [])
    {'role': 'assistant', 'content': 'bye'}
    """

    SYSTEM, USER, ASSISTANT, TOOL, END, CALL, CALL_END, TOOLS = range(256, 264)
    vocab_size = 264
    stop_token_ids: tuple[int, ...] = (END,)

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        schemas = [self.TOOLS, *json.dumps(tools).encode(), self.END] if tools else []
        return [*schemas, *self._render(messages), self.ASSISTANT]

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int] | None:
        turn = token_ids[turn_start:]
        # END anywhere else, or nowhere: what follows would not be what a whole rendering gives.
        if self.END not in turn or list(turn).index(self.END) != len(turn) - 1:
            return None
        return [*self._render(messages), self.ASSISTANT]

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message:
        content: list[int] = []
        calls: list[ToolCall] = []
        inside: list[int] | None = None
        for token in turn_ids:
            if token == self.CALL:
                inside = []
            elif token == self.CALL_END and inside is not None:
                calls.append(_parse_call(inside))
                inside = None
            elif token < 256:
                (content if inside is None else inside).append(token)
        if inside is not None:
            calls.append({"type": "function", "error": "the call is not closed"})
        message: Message = {"role": "assistant", "content": bytes(content).decode(errors="replace")}
        if calls:
            message["tool_calls"] = calls
        return message

    def conversation(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        token_ids = self.open(messages[:first], tools)[:-1]
        sampled = [False] * len(token_ids)
        for message in messages[first:]:
            if message["role"] == "assistant":
                turn = self.turn(message.get("content", ""), *message.get("tool_calls", ()))
                token_ids += [self.ASSISTANT, *turn]
                sampled += [False] + [True] * len(turn)
            else:
                rendered = self._render([message])
                token_ids += rendered
                sampled += [False] * len(rendered)
        return token_ids, sampled

    def turn(self, content: str = "", *calls: ToolCall) -> list[int]:
        """The ids that a policy samples for this turn."""
        token_ids = list(content.encode())
        for call in calls:
            token_ids += [self.CALL, *json.dumps(call["function"]).encode(), self.CALL_END]
        return [*token_ids, self.END]

    def _render(self, messages: list[Message]) -> list[int]:
        marks = {"system": self.SYSTEM, "user": self.USER, "assistant": self.ASSISTANT, "tool": self.TOOL}
        token_ids: list[int] = []
        for message in messages:
            token_ids += [marks[message["role"]], *message.get("content", "").encode(), self.END]
        return token_ids


def _parse_call(ids: list[int]) -> ToolCall:
    text = bytes(ids).decode(errors="replace")
    try:
        function = json.loads(text)
        return {"type": "function", "function": {"name": function["name"], "arguments": function["arguments"]}}
    except (ValueError, KeyError, TypeError) as error:
        return {"type": "function", "error": f"{text!r} is not a call: {type(error).__name__}: {error}"}
