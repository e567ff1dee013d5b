"""What the campaign's runs play: environments whose calls leave traces outside, and policies known beforehand."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from gspo_agent.env import Env, ToolEnv, call_id, tool
from gspo_agent.errors import EnvError, SandboxError
from gspo_agent.messages import Message, call, user
from gspo_agent.sandbox import shared_sandbox
from gspo_agent.testing import ByteChat
from tests.faults.outside import Outside

CHAT = ByteChat()
TOOL_TIMEOUT = 3.0  # a busy machine may take a second to start one


class World:
    """Where the calls of this process go; None in the judge's, where they have no effect and the same results."""

    outside: ClassVar[Outside | None] = None
    tool_seconds: ClassVar[float] = 0.004


def _tasks() -> Iterator[dict[str, Any]]:
    return ({"a": n % 7, "b": n % 5, "number": n} for n in itertools.count())


class Till(ToolEnv):
    """Add numbers up. The tools are processes; one in four tasks has a state that is a blob."""

    def setup(self, task: dict[str, Any]) -> None:
        self.total = 0
        self.receipt = "x" * 70_000 if task["number"] % 4 == 0 else ""

    def prompt(self, task: dict[str, Any]) -> str:
        return f"What is {task['a']} + {task['b']}?"

    @tool(timeout=TOOL_TIMEOUT)
    async def add(self, number: int) -> str:
        """Adds a number to the total."""
        self.total += 1000  # what an interrupted call leaves here must be gone
        try:
            await _run_tool_async("add")
        finally:
            self.total -= 1000
        self.total += number
        return str(self.total)

    @tool(timeout=TOOL_TIMEOUT)
    def draw(self) -> str:
        """Adds a number that nobody knows beforehand."""
        number = int(self.np_random.integers(10))
        self.total += number
        _run_tool("draw")
        return f"{number} more: {self.total}"

    @tool(timeout=TOOL_TIMEOUT, idempotent=True)
    def look(self) -> str:
        """Shows the total."""
        _run_tool("look")
        return f"total {self.total}"

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"near": 1 / (1 + abs(self.total - task["a"] - task["b"])), "said": len(answer) % 5 / 5}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Iterator[dict[str, Any]]:
        return _tasks()


class Forgetful(Till):
    """Has an attribute that is no JSON: its episodes start again after a kill."""

    def setup(self, task: dict[str, Any]) -> None:
        super().setup(task)
        self.handle = object()


class Bench(Till):
    """Its tools are programs in the real sandbox."""

    @tool
    async def add(self, number: int) -> str:
        """Adds a number to the total, in the sandbox."""
        if World.outside is not None:
            World.outside.write("calls", _id(), 0, "add")
            result = await shared_sandbox().run(f"print({self.total} + {number})")
            if result.status != "ok":
                raise SandboxError(f"the sandbox said {result.status}")
            self.total = int(result.stdout)
        else:
            self.total += number
        return str(self.total)


class Clerk(Env):
    """A plain environment with a state; each step is one call with an effect outside."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.total, self.left = 0, 3
        return [user("count")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.left -= 1
        self.total += len(action["content"])
        await _run_tool_async("step")
        if self.left:
            return [user(f"{self.total}, {self.left} left")], 0.0, False, False, {}
        return [], self.total / 100, True, False, {}

    def get_state(self) -> Any:
        return {"total": self.total, "left": self.left}

    def set_state(self, state: Any) -> None:
        self.total, self.left = state["total"], state["left"]

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Iterator[dict[str, Any]]:
        return _tasks()


class Guess(Env):
    """A plain environment that keeps no state: after a kill its actions are repeated and compared."""

    state_level = "replay"

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.secret, self.left = int(self.np_random.integers(100)), 4
        return [user("guess")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.left -= 1
        distance = abs(zlib.crc32(action["content"].encode()) % 100 - self.secret)
        if not self.left or not distance:
            return [], 1 - distance / 100, True, False, {}
        return [user(f"off by {distance}, {self.left} left")], 0.0, False, False, {}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Iterator[dict[str, Any]]:
        return _tasks()


class Essay(ToolEnv):
    """One turn of twenty thousand tokens."""

    def prompt(self, task: dict[str, Any]) -> str:
        return "essay"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return zlib.crc32(answer.encode()) % 100 / 100

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Iterator[dict[str, Any]]:
        return _tasks()


WORLDS: dict[str, type[Env]] = {
    "till": Till, "forgetful": Forgetful, "bench": Bench, "clerk": Clerk, "guess": Guess, "essay": Essay,
}  # fmt: skip
ESSAY_TOKENS = 20_000


def policy(prompt: Sequence[int], seed: int) -> list[int]:
    """The turn after `prompt`: a function of every token so far, so that a wrong state before it shows in it."""
    draw = random.Random(zlib.crc32(np.array(prompt, np.int64).tobytes()) + seed)
    if prompt == CHAT.open([user("essay")], []):
        return [*draw.choices(range(97, 123), k=ESSAY_TOKENS - 1), ByteChat.END]
    words = "hm " * draw.randint(0, 16)
    turn = sum(token == ByteChat.ASSISTANT for token in prompt) - 1
    if ByteChat.TOOLS not in prompt or turn >= 3 or draw.random() < 0.15:
        return CHAT.turn(f"{words}it is {draw.randint(0, 9)}")
    calls = [call("add", number=draw.randint(0, 6)), call("draw"), call("look")]
    return CHAT.turn(words, *draw.sample(calls, draw.choice((1, 1, 2, 3))))


class DiceChat(ByteChat):
    """A chat for a model with random weights: many tokens end a turn, and its sum decides what it says."""

    stop_token_ids = tuple(range(0, ByteChat.vocab_size, 12))

    def extend(
        self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int] | None:
        if not token_ids[turn_start:] or token_ids[-1] not in self.stop_token_ids:
            return None
        return [*self._render(messages), self.ASSISTANT]

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message:
        total = sum(turn_ids)
        message: Message = {"role": "assistant", "content": f"said {total}"}
        if tools and total % 4:
            number = total % 4
            message["tool_calls"] = [(call("draw"), call("look"), call("add", number=total % 7))[number - 1]]
        return message


def _id() -> str:
    """The call's id without the run's."""
    return call_id().partition("/")[2]


def _run_tool(name: str) -> None:
    if World.outside is not None:
        _judge(World.outside.call(_id(), name, World.tool_seconds))


async def _run_tool_async(name: str) -> None:
    if World.outside is not None:
        _judge(await World.outside.acall(_id(), name, World.tool_seconds))


def _judge(status: int) -> None:
    """A tool that was killed has not answered: a fault of the environment, not something to tell the model."""
    if status:
        raise EnvError(f"the tool's process ended with {status}")
