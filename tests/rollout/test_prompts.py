from __future__ import annotations

from typing import Any

from gspo_agent.messages import Message, user
from gspo_agent.rollout.prompts import SharedPrompts
from gspo_agent.testing import ByteChat


class Counting(ByteChat):
    opened = 0

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        self.opened += 1
        return super().open(messages, tools)


def test_one_prompt_is_rendered_once_and_every_episode_has_its_own_copy() -> None:
    chat = Counting()
    shared = SharedPrompts(chat)
    first = shared.open([user("a")], [])
    first.append(1)
    assert shared.open([user("a")], []) == ByteChat().open([user("a")], [])
    assert chat.opened == 1
    for messages, tools in (([user("b")], []), ([user("a")], [{"type": "function"}]), ([user("a"), user("")], [])):
        assert shared.open(messages, tools) == ByteChat().open(messages, tools)
    assert chat.opened == 4
    for number in range(300):
        shared.open([user(str(number))], [])
    shared.open([user("a")], [])
    assert chat.opened == 305
