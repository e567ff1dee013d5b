"""TemplateChat: a chat template that nobody here knows, used by difference and only once that is proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo_agent.chat.base import as_list, build_conversation, first_stop
from gspo_agent.chat.calls import split_hermes
from gspo_agent.chat.text import SafeTokenizer
from gspo_agent.errors import ChatError
from gspo_agent.messages import Message, ToolCall, assistant, call, tool_result, user

_ANCHOR = "qzanchorzq"
_REMEDY = (
    "use a model of a family that `renderers` knows (such as Qwen3), or a chat template that never rewrites a turn"
)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


class TemplateChat:
    """What follows a turn is what the template writes after it: the difference of two renderings.

    At load it is proven, over conversations of all kinds, that every rendering begins with the one before and that
    the difference does not depend on what came earlier; otherwise ChatError.
    """

    def __init__(self, tokenizer: SafeTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._close = self._find_close()
        self._stop = next((token for token in tokenizer.control_ids if self._close.startswith(token)), "")
        if not self._stop:
            raise self._error(f"ends the assistant's turn with {self._close[:20]!r}, not with a special token")
        stops = [tokenizer.control_ids[self._stop], tokenizer.eos_token_id]
        self.stop_token_ids = tuple(dict.fromkeys(i for i in stops if i is not None))
        self.takes_tools = self._text([user("x")], [_TOOL], True) != self._text([user("x")], [], True)
        self._prove()

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        if tools and not self.takes_tools:
            raise self._error("does not show tools to the model")
        guard = self.tokenizer
        return guard.encode(self._text(guard.guard_messages(messages), guard.guard_json(tools), True))

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int] | None:
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("extend takes the messages that answer a turn: at least one, none of the assistant's")
        turn = as_list(token_ids[turn_start:])
        stops = set(self.stop_token_ids)
        if not stops.isdisjoint(turn[:-1]):
            return None
        closing = [] if turn and turn[-1] in stops else [self.tokenizer.control_ids[self._stop]]
        return closing + self.tokenizer.encode(
            self._after(self.tokenizer.guard_messages(messages), self.tokenizer.guard_json(tools))
        )

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message:
        turn = as_list(turn_ids)
        stop = first_stop(turn, self.stop_token_ids)
        text = self.tokenizer.decode(turn[:stop]) if stop else ""
        thinking, closed, rest = text.partition("</think>")
        reasoning = ""
        if closed:
            reasoning, text = thinking.replace("<think>", "").strip(), rest
        elif text.lstrip().startswith("<think>"):
            reasoning, text = text.replace("<think>", "").strip(), ""
        content, calls = split_hermes(text)
        message = assistant(content, calls)
        if reasoning:
            message["reasoning_content"] = reasoning
        return message

    def conversation(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        return build_conversation(self, messages, tools, self._turn)

    def _turn(self, message: Message) -> list[int]:
        before = self._text([user("x")], [], True)
        whole = self._text([user("x"), *self.tokenizer.guard_messages([message])], [], False)
        if not whole.startswith(before) or not whole.endswith(self._close):
            raise self._error("writes this assistant's message otherwise than its own prompt begins it")
        body = whole[len(before) : len(whole) - len(self._close)]
        return [*self.tokenizer.encode(body), self.tokenizer.control_ids[self._stop]]

    def _after(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """The text after the stop token of a turn that `messages` answer, up to where the next turn begins."""
        history = [user("x"), _asking(messages)]
        before = self._text(history, tools, False)
        whole = self._text([*history, *messages], tools, True)
        if not whole.startswith(before):
            raise self._error(f"rewrites the assistant's turn once {messages[0]['role']!r} answers it")
        return self._close[len(self._stop) :] + whole[len(before) :]

    def _find_close(self) -> str:
        rendered = self._text([user("x"), assistant(_ANCHOR)], [], False)
        if rendered.count(_ANCHOR) != 1:
            raise self._error("does not write the assistant's content exactly once")
        return rendered.partition(_ANCHOR)[2]

    def _prove(self) -> None:
        for name, conversation, tools in _conversations():
            if tools and not self.takes_tools:
                continue
            for position, message in enumerate(conversation):
                if message["role"] == "assistant":
                    self._prove_turn(name, conversation, position, tools)

    def _prove_turn(self, name: str, conversation: list[Message], position: int, tools: list[dict[str, Any]]) -> None:
        before = self._text(conversation[:position], tools, True)
        turn = self._text(conversation[: position + 1], tools, False)
        if not turn.startswith(before):
            raise self._error(f"does not continue its own prompt ({name})")
        if not turn.endswith(self._close):
            raise self._error(f"does not always end the assistant's turn with {self._close!r} ({name})")
        after = position + 1
        while after < len(conversation) and conversation[after]["role"] != "assistant":
            after += 1
        answers = conversation[position + 1 : after]
        if answers:
            whole = self._text(conversation[:after], tools, True)
            expected = turn[: len(turn) - len(self._close)] + self._stop + self._after(answers, tools)
            if whole != expected:
                raise self._error(f"breaks the prefix property: a later message changes what came before it ({name})")

    def _text(self, messages: Any, tools: Any, prompt: bool) -> str:
        try:
            return str(
                self.tokenizer.inner.apply_chat_template(
                    messages,
                    tools=tools or None,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise self._error(f"cannot write a conversation of {roles}: {error}") from error

    def _error(self, problem: str) -> ChatError:
        return ChatError(f"the chat template of {self.tokenizer.name_or_path!r} {problem}; {_REMEDY}")


def _asking(messages: list[Message]) -> Message:
    """An assistant's turn that `messages` can answer."""
    results = [message for message in messages if message["role"] == "tool"]
    calls: list[ToolCall] = []
    for result in results:
        asked = call(result.get("name") or "look", at="x")
        if result.get("tool_call_id"):
            asked["id"] = result["tool_call_id"]
        calls.append(asked)
    return assistant("" if calls else "x", calls)


def _conversations() -> list[tuple[str, list[Message], list[dict[str, Any]]]]:
    look, two = call("look", at="home"), [call("look", at="a"), call("look", at="b")]
    found, lost = tool_result("found", name="look"), tool_result("", name="look", outcome="error")
    thought = assistant("<think>\nLet me see.\n</think>\n\nwell")
    thought_call = assistant(thought["content"], [look])
    words = [user("one"), assistant("two"), user("three\n"), assistant("four"), user("five"), assistant("six")]
    called = [user("one"), assistant("", [look]), found, assistant("I see", two), found, lost, assistant("done")]
    return [
        ("words only", words, []),
        ("words only, with tools", words, [_TOOL]),
        ("tool calls", called, [_TOOL]),
        ("tool calls, then a user", [*called, user("again"), assistant("", [look]), found, assistant("x")], [_TOOL]),
        ("thinking", [user("one"), thought, user("two"), thought, user("three"), assistant("x")], []),
        ("thinking and tools", [user("one"), thought_call, found, thought], [_TOOL]),
    ]
