"""Episodes of some turns with a policy that says anything: a chat in which it soon stops, and who answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo_agent.env import Env
from gspo_agent.messages import Message, user
from gspo_agent.testing import ByteChat
from tests.sglang.asking import VOCAB

TURNS = 4


class AnyChat(ByteChat):
    """Every 16th id ends a turn, and every turn can be gone on from."""

    vocab_size = VOCAB
    stop_token_ids = tuple(range(7, VOCAB, 16))

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int]:
        return self.open(messages, [])


class Talk(Env):
    """Answers at some length, and rewards long turns."""

    state_level = "state"
    turns = 0

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.turns = 0
        return [user(f"number {(options or {})['task']['number']}: " + "say something. " * 8)], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.turns += 1
        over = self.turns == TURNS
        return [] if over else [user("go on. " * 8)], len(action["content"]) / 100, over, False, {}

    async def aget_state(self) -> Any:
        return self.turns

    async def aset_state(self, state: Any) -> None:
        self.turns = state
