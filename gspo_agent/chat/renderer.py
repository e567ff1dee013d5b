"""RendererChat: the chat of a model family that the `renderers` package knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from renderers.reasoning import prompt_ends_in_reasoning

from gspo_agent.chat.base import as_list, build_conversation, first_stop
from gspo_agent.chat.calls import broken_call, make_call, split_hermes, spoil
from gspo_agent.chat.text import SafeTokenizer
from gspo_agent.errors import ChatError
from gspo_agent.messages import Message, ToolCall, assistant, tool_result, user

_PROBLEMS = {
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}

LOCAL_BRIDGE = frozenset({"qwen3"})
"""Renderers that, when they close a turn, look neither at the tools nor further back than to the last stop token before
it: of what precedes a turn, they ask only whether it opens the thinking. Their calls are Hermes-style, so that between
calls there is nothing but whitespace."""


class RendererChat:
    """Wraps one renderer, which must keep thinking (`thinking_retention="all"`)."""

    def __init__(self, renderer: Any, tokenizer: SafeTokenizer) -> None:
        self.renderer, self.tokenizer = renderer, tokenizer
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self.vocab_size = tokenizer.vocab_size
        self._stops = frozenset(self.stop_token_ids)
        self._local = renderer.config.name in LOCAL_BRIDGE
        self._probe = self.open([user("x")], [])
        without_prompt = renderer.render_ids([user("x")], tools=None)
        self._generation_prompt = self._probe[len(without_prompt) :]
        # Asked once; the renderer would work it out again for every turn.
        opens = prompt_ends_in_reasoning(tokenizer, self._generation_prompt, stop_ids=self._stops)
        self._parse_prompt = None if self._local and not opens else self._generation_prompt
        self._think = tokenizer.control_ids.get("<think>")

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        guarded = self.tokenizer.guard_messages(messages)
        return list(self.renderer.render_ids(guarded, tools=self._tools(tools), add_generation_prompt=True))

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int] | None:
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("extend takes the messages that answer a turn: at least one, none of the assistant's")
        turn = as_list(token_ids[turn_start:])
        if not self._stops.isdisjoint(turn[:-1]):  # the renderer would drop what follows the stop token
            return None
        prompt, turn = self._seen(token_ids, turn_start, turn)
        guarded = self.tokenizer.guard_messages(messages)
        shown = None if self._local else self._tools(tools)
        bridged = self.renderer.bridge_to_next_turn(prompt, turn, guarded, tools=shown)
        if bridged is None:
            return None
        previous = prompt + turn
        extended: list[int] = list(bridged.token_ids)
        return extended[len(previous) :] if extended[: len(previous)] == previous else None

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message:
        turn = as_list(turn_ids)
        turn = turn[: first_stop(turn, self.stop_token_ids)]
        try:
            parsed = self.renderer.parse_response(turn, tools=tools or None, prompt_ids=self._parse_prompt)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
            content, calls = split_hermes(self.tokenizer.decode(turn))
            return assistant(content, calls or [broken_call(f"the turn cannot be read ({error})", "")])
        calls = [self._call(found) for found in parsed.tool_calls]
        if self._local:
            self._refuse_trailing_text(turn, parsed.tool_calls, calls)
        message = assistant(parsed.content or "", calls)
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        return message

    def conversation(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        return build_conversation(self, messages, tools, self._turn)

    def _turn(self, message: Message) -> list[int]:
        """The assistant's message as it would have been sampled, stop token included."""
        # In the middle of a tool cycle: the last turn of a rendered history gets an empty thinking block.
        around = self.tokenizer.guard_messages([user("x"), message, tool_result("x")])
        rendered: list[int] = list(self.renderer.render_ids(around))
        start = len(self._probe)
        end = next((i for i in range(start, len(rendered)) if rendered[i] in self._stops), None)
        if rendered[:start] != self._probe or end is None:
            raise ChatError(
                f"renderer {self.renderer.config.name!r} writes the assistant's turns otherwise than its own prompt "
                f"begins them; a cold start needs a family where they agree, such as qwen3"
            )
        return rendered[start : end + 1]

    def _seen(self, token_ids: Sequence[int], turn_start: int, turn: list[int]) -> tuple[list[int], list[int]]:
        """The least of prompt and turn that the renderer closes as it would close the whole."""
        if not self._local:
            return as_list(token_ids[:turn_start]), turn
        prompt = self._generation_prompt
        if as_list(token_ids[max(0, turn_start - len(prompt)) : turn_start]) == prompt:
            if self._parse_prompt is None and self._think is not None and self._think not in turn:
                # Thinking is open nowhere: all that matters is whether the turn has its stop token.
                return prompt[:1], turn[-1:] if turn and turn[-1] in self._stops else []
            return prompt, turn
        for position in range(turn_start - 1, -1, -1):
            if int(token_ids[position]) in self._stops:
                return as_list(token_ids[position:turn_start]), turn
        return as_list(token_ids[:turn_start]), turn

    def _tools(self, tools: list[dict[str, Any]]) -> Any:
        return self.tokenizer.guard_json(tools) or None

    def _call(self, found: Any) -> ToolCall:
        problem = _PROBLEMS.get(str(found.status))
        if problem is not None:
            return broken_call(problem, found.raw, found.name)
        return make_call(found.name, found.arguments, found.raw)

    def _refuse_trailing_text(self, turn: list[int], found: list[Any], calls: list[ToolCall]) -> None:
        for position, call in enumerate(calls):
            start = found[position].token_span[1]
            end = found[position + 1].token_span[0] if position + 1 < len(calls) else len(turn)
            text = self.tokenizer.decode(turn[start:end]) if end > start else ""
            if text.strip():
                calls[position] = spoil(call, "there is text after the tool call", text)
