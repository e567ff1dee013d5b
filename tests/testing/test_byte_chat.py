"""ByteChat: growing by extension gives what rendering the whole gives, and text never becomes a mark."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gspo_agent.messages import Message, assistant, call, tool_result, user
from gspo_agent.testing import ByteChat

CHAT = ByteChat()
text = st.text(st.characters(codec="utf-8"), max_size=12)
calls = st.lists(st.builds(lambda name, n: call(name, number=n), text, st.integers()), max_size=2)
turns = st.lists(
    st.tuples(st.builds(assistant, text, calls), st.lists(st.builds(tool_result, text), min_size=1)), max_size=3
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]


@given(text, turns, st.sampled_from([[], TOOLS]))
def test_an_extended_conversation_is_the_rendered_one(prompt: str, turns: Any, tools: Any) -> None:
    messages: list[Message] = [user(prompt)]
    token_ids = CHAT.open(messages, tools)
    sampled = [False] * len(token_ids)
    for action, observation in [*turns, (assistant("end"), [])]:
        turn, start = CHAT.turn(action["content"], *action.get("tool_calls", ())), len(token_ids)
        token_ids += turn
        sampled += [True] * len(turn)
        assert CHAT.parse(turn, tools) == action
        messages += [action, *observation]
        if observation:
            tail = CHAT.extend(token_ids, start, observation, tools)
            assert tail is not None
            token_ids += tail
            sampled += [False] * len(tail)
    assert CHAT.conversation(messages, tools) == (token_ids, sampled)


@given(text)
def test_no_text_holds_a_mark(content: str) -> None:
    prompt = CHAT.open([user(content)], [])
    assert [token for token in prompt if token >= 256] == [CHAT.USER, CHAT.END, CHAT.ASSISTANT]
    assert max(prompt) < CHAT.vocab_size


def test_a_turn_that_does_not_end_has_no_bridge() -> None:
    prompt = CHAT.open([user("a")], [])
    for turn in ([*b"abc"], [*b"abc", CHAT.END, *b"d"], [CHAT.END, CHAT.END], []):
        assert CHAT.extend([*prompt, *turn], len(prompt), [user("b")], []) is None
    assert CHAT.extend([*prompt, CHAT.END], len(prompt), [user("b")], []) is not None


def test_a_call_that_cannot_be_read_says_why() -> None:
    for inside in (b"{", b"[]", b'{"name": "add"}', b"\xff"):
        message = CHAT.parse([CHAT.CALL, *inside, CHAT.CALL_END, CHAT.END], [])
        assert "is not a call" in message["tool_calls"][0]["error"]
    unclosed = CHAT.parse([CHAT.CALL, *b"{}", CHAT.END], [])
    assert unclosed["tool_calls"][0]["error"] == "the call is not closed"
