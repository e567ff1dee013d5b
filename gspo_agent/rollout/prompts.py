"""SharedPrompts: the members of a group begin with the same messages, which need rendering once."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import orjson

from gspo_agent.messages import Message

if TYPE_CHECKING:
    # At run time it would bring transformers along.
    from gspo_agent.chat import Chat

_KEPT = 256


class SharedPrompts:
    """A chat that remembers its last openings; everything else is `chat`'s own."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._opened: OrderedDict[bytes, list[int]] = OrderedDict()
        self.stop_token_ids, self.vocab_size = chat.stop_token_ids, chat.vocab_size
        self.extend, self.parse, self.conversation = chat.extend, chat.parse, chat.conversation

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        key = orjson.dumps([messages, tools])
        token_ids = self._opened.get(key)
        if token_ids is None:
            token_ids = self._opened[key] = self._chat.open(messages, tools)
            if len(self._opened) > _KEPT:
                self._opened.popitem(last=False)
        return list(token_ids)
