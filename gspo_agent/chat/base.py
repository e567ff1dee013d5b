"""What a chat promises, and how a whole conversation follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from gspo_agent.messages import Message


class Chat(Protocol):
    """The token side of a conversation. Sampled tokens are never tokenised again: an episode only ever grows.

    >>> ids = chat.open(messages, tools)
    >>> turn = sample(ids)
    >>> tail = chat.extend(ids + turn, len(ids), observation, tools)
    """

    stop_token_ids: tuple[int, ...]
    vocab_size: int

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt of the first turn, up to where the assistant begins to write."""
        ...

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int] | None:
        """What follows `token_ids`, whose part from `turn_start` on is the sampled turn: its closing where the turn
        has none, `messages`, and the prompt of the next turn. None where no closing can be given that keeps every
        sampled token: the turn goes on after a stop token, or stops inside its thinking."""
        ...

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message:
        """The whole turn as a message; a call that cannot be run carries `error`, written for the model."""
        ...

    def conversation(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """A written conversation as an episode would have produced it, and [T] True where the assistant wrote,
        stop tokens included."""
        ...


def build_conversation(
    chat: Chat, messages: list[Message], tools: list[dict[str, Any]], turn_of: Callable[[Message], list[int]]
) -> tuple[list[int], list[bool]]:
    """Plays `messages` through `open` and `extend`, with `turn_of(message)` as the sampled turns."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if not first:
        raise ValueError("a conversation needs a message and then an assistant's turn")
    token_ids = chat.open(messages[:first], tools)
    written = [False] * len(token_ids)
    position = first
    while position < len(messages):
        turn = turn_of(messages[position])
        start = len(token_ids)
        token_ids += turn
        written += [True] * len(turn)
        after = position + 1
        while after < len(messages) and messages[after]["role"] != "assistant":
            after += 1
        if after == position + 1 < len(messages):
            raise ValueError(f"messages {position} and {after} are both the assistant's")
        if after > position + 1:
            tail = chat.extend(token_ids, start, messages[position + 1 : after], tools)
            if tail is None:
                raise ValueError(f"message {position} cannot be closed; its text or thinking is malformed")
            token_ids += tail
            written += [False] * len(tail)
        position = after
    return token_ids, written


def first_stop(token_ids: list[int], stops: Iterable[int]) -> int:
    """Where the first of `stops` is in `token_ids`; their length where there is none."""
    return min((token_ids.index(stop) for stop in stops if stop in token_ids), default=len(token_ids))


def as_list(token_ids: Sequence[int]) -> list[int]:
    """Plain ints; an array's `tolist` is many times faster than iterating it."""
    tolist = getattr(token_ids, "tolist", None)
    return list(tolist() if tolist else token_ids)
