"""Cut anywhere: whatever an episode was in the middle of, it goes on as if it had not been cut."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.engine.base import Completion, Sampling
from gspo_agent.env import Env, ToolEnv, tool
from gspo_agent.messages import Message, ToolCall, call, user
from gspo_agent.rollout.journal import read_events
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import weight_version
from tests.rollout.scene import CHAT, Run, Shop, play_to_the_end, sampled_again, until, view

ONE = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, journal_tokens=7, filter_zero_variance=False)


class TagChat(ByteChat):
    """Its tool calls stand between tags that are text, twelve tokens and more each, as with tokenizers that have no
    special token for them."""

    def parse(self, turn_ids: Sequence[int], tools: list[dict[str, Any]]) -> Message:
        text = bytes(token for token in turn_ids if token < 256).decode(errors="replace")
        calls: list[ToolCall] = [
            {"type": "function", "function": json.loads(inside)}
            for inside in re.findall("<tool_call>(.*?)</tool_call>", text)
        ]
        message: Message = {"role": "assistant", "content": re.sub("<tool_call>.*?</tool_call>", "", text)}
        if calls:
            message["tool_calls"] = calls
        return message

    def turn(self, content: str = "", *calls: ToolCall) -> list[int]:
        parts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        return super().turn(content + "".join(f"<tool_call>{part}</tool_call>" for part in parts))


class Echo(ToolEnv):
    """Says again what it is told."""

    def prompt(self, task: dict[str, Any]) -> str:
        return "écoute"

    def setup(self, task: dict[str, Any]) -> None:
        self.heard: list[str] = []

    @tool
    async def say(self, word: str) -> str:
        """Say a word."""
        self.heard.append(word)
        return f"{word} 漢"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(self.heard == ["ü😀"] and answer == "né 漢😀")


def speaker(chat: ByteChat) -> Any:
    def speak(prompt: Sequence[int], seed: int) -> list[int]:
        first = list(prompt).count(ByteChat.ASSISTANT) == 1
        return chat.turn("é😀", call("say", word="ü😀")) if first else chat.turn("né 漢😀")

    return speak


def at_rest(run: Run) -> bool:
    progress = run.collector.progress()
    return bool(progress.ready_groups) or 0 < progress.in_flight == len(run.engine.held)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("chat", [ByteChat(), TagChat()])
async def test_a_cut_inside_a_tag_a_code_point_or_at_the_stop_token_changes_nothing(
    fast_path: Path, chat: ByteChat, every: int
) -> None:
    """Killed before every token of a turn, or every so many: inside tags of one special token or of many, inside
    characters of two, three and four bytes."""
    with Run(fast_path / "whole.sqlite", Echo, ONE, engine=ScriptedEngine(speaker(chat)), chat=chat) as run:
        whole = await play_to_the_end(run)
    assert [t.reward for t in whole] == [1.0, 1.0]
    (row,) = whole[0].rows()
    positions = (row.sampled & (row.turns == 0)).nonzero()[0].tolist()
    assert len(positions) > 40
    for position in positions[::every]:
        alive, dead = fast_path / f"{position}", fast_path / f"{position}-killed"
        engine = ScriptedEngine(speaker(chat))
        engine.hold_at = position
        with Run(alive / "journal.sqlite", Echo, ONE, engine=engine, chat=chat) as run:
            await run.collector.start(0)
            await until(lambda run=run: at_rest(run))
            await run.journal.transact(lambda connection: None)
            shutil.copytree(alive, dead)
            await run.collector.stop()
        engine = ScriptedEngine(speaker(chat), weight_version=weight_version(2, 0))
        with Run(dead / "journal.sqlite", Echo, ONE, engine=engine, chat=chat) as run:
            resumed = await play_to_the_end(run)
        assert [view(t) for t in resumed] == [view(t) for t in whole], position
        assert not sampled_again(dead / "journal.sqlite")
        shutil.rmtree(alive)
        shutil.rmtree(dead)


class Gate:
    """What waits here waits until it is opened; whoever came is counted."""

    def __init__(self, members: int = 2) -> None:
        self.open, self.came, self.members = asyncio.Event(), 0, members

    async def passed(self) -> None:
        self.came += 1
        await self.open.wait()

    async def reached(self) -> None:
        await until(lambda: self.came >= self.members)


class Gated(Shop):
    """Waits at the gate of each of its hooks, where there is one."""

    gates: ClassVar[dict[str, Gate]] = {}

    async def _gate(self, name: str) -> None:
        if name in self.gates:
            await self.gates[name].passed()

    async def setup(self, task: dict[str, Any]) -> None:
        await self._gate("setup")
        Shop.setup(self, task)
        await self._gate("set up")

    @tool(idempotent=True)
    async def add(self, number: int) -> str:
        """Adds a number to the running total."""
        await self._gate("tool")
        self.total += number
        return str(self.total)

    @tool(idempotent=True)
    async def flood(self) -> str:
        """More than any context holds."""
        return "x" * 100_000

    async def score(self, task: dict[str, Any], answer: str) -> Any:
        await self._gate("score")
        return Shop.score(self, task, answer)


def adder(prompt: Sequence[int], seed: int) -> list[int]:
    turn = list(prompt).count(ByteChat.ASSISTANT) - 1
    return CHAT.turn("x" * 20, call("add", number=turn)) if turn < 2 else CHAT.turn("it is 1")


async def cut_at_a_gate(
    path: Path,
    gate: str,
    *,
    killed: bool,
    limits: Limits | None = None,
    answer: Any = adder,
    env: Any = Gated,
    chat: ByteChat = CHAT,
) -> tuple[list[Any], list[Any]]:
    """(uncut, cut at the gate and gone on with in a later life)."""
    limits = limits or Limits()
    env.gates = {}
    with Run(path / "whole.sqlite", env, ONE, limits, ScriptedEngine(answer), chat=chat) as run:
        whole = await play_to_the_end(run)
    env.gates = {gate: Gate()}
    alive = path / "alive" / "journal.sqlite"
    with Run(alive, env, ONE, limits, ScriptedEngine(answer), chat=chat) as run:
        await run.collector.start(0)
        await env.gates[gate].reached()
        if killed:
            await run.journal.transact(lambda connection: None)
            shutil.copytree(alive.parent, path / "dead")
        await run.collector.stop()
    env.gates = {}
    place = path / ("dead" if killed else "alive") / "journal.sqlite"
    with Run(place, env, ONE, limits, ScriptedEngine(answer), chat=chat) as run:
        resumed = await play_to_the_end(run)
    assert not sampled_again(place)
    return whole, resumed


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("gate", ["setup", "set up", "tool", "score"])
async def test_a_cut_in_the_reset_in_a_tool_or_in_the_judge_changes_nothing(
    fast_path: Path, gate: str, killed: bool
) -> None:
    whole, resumed = await cut_at_a_gate(fast_path, gate, killed=killed)
    assert [view(t) for t in resumed] == [view(t) for t in whole]


def flooder(prompt: Sequence[int], seed: int) -> list[int]:
    return CHAT.turn("", call("flood"))


class StopsAtZero(ByteChat):
    """A turn that ends at its stop token has no bridge to the next."""

    stop_token_ids = (0,)


def unclosed(prompt: Sequence[int], seed: int) -> list[int]:
    return [*b"a", ByteChat.CALL, *b'{"name": "add", "arguments": {"number": 1}}', ByteChat.CALL_END, 0]


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize(
    ("changes", "answer", "reason"),
    [
        ({"turns": 2}, adder, "turns"),
        ({"turn_tokens": 13}, adder, "turn_tokens"),
        ({"turn_tokens": 14}, adder, "turn_tokens"),  # two full requests and nothing left
        ({"episode_tokens": 70}, adder, "episode_tokens"),
        ({"tool_calls": 1}, adder, "tool_calls"),
        ({"context_tokens": 440}, adder, "context_tokens"),
        ({"context_tokens": 1000}, flooder, "context_tokens"),  # by the observation, of which nothing is recorded
        ({}, unclosed, "unclosed_turn"),
    ],
)
async def test_a_cut_while_a_limit_is_scored_ends_the_episode_at_the_same_limit(
    fast_path: Path, changes: dict[str, Any], answer: Any, reason: str, killed: bool
) -> None:
    chat = StopsAtZero() if answer is unclosed else CHAT
    whole, resumed = await cut_at_a_gate(
        fast_path, "score", killed=killed, limits=Limits(**changes), answer=answer, chat=chat
    )
    assert {t.stop_reason for t in whole} == {reason}
    assert [view(t) for t in resumed] == [view(t) for t in whole]


class OneStep(Env):
    """A plain environment whose every step is one call that may not run twice; its answer fits into no context."""

    state_level = "state"
    gates: ClassVar[dict[str, Gate]] = {}
    steps: ClassVar[list[str]] = []

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        return [user("go")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        OneStep.steps.append(self.episode_id)
        return [user("x" * 100_000)], 0.0, False, False, {}

    async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        if "score" in self.gates:
            await self.gates["score"].passed()
        return 0.25, {}

    def get_state(self) -> Any:
        return {}

    def set_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("killed", [True, False])
async def test_the_limit_that_a_step_ran_into_is_not_asked_for_again(fast_path: Path, killed: bool) -> None:
    """Its answer could not be recorded, and the step may not run twice: only the limit itself tells what happened."""
    OneStep.steps.clear()
    whole, resumed = await cut_at_a_gate(
        fast_path, "score", killed=killed, limits=Limits(context_tokens=1000), env=OneStep
    )
    assert {(t.stop_reason, t.reward) for t in whole} == {("context_tokens", 0.25)}
    assert [view(t) for t in resumed] == [view(t) for t in whole]
    assert len(OneStep.steps) == 4  # two members, twice


@pytest.mark.parametrize("where", ["tool", "tokens"])
async def test_a_cut_while_the_wall_limit_is_scored_is_no_new_time(fast_path: Path, where: str) -> None:
    """A tool, or a request, that took the whole wall time; then the judge is cut. The next life has no time left."""
    scoring = Gate()

    class Slow(Gated):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            if where == "tool":
                await asyncio.sleep(3600)
            return ""

    Slow.gates = {"score": scoring}
    path, limits = fast_path / "journal.sqlite", Limits(wall=0.3)
    engine = ScriptedEngine(adder)
    engine.hold_at = 330 if where == "tokens" else None
    with Run(path, Slow, ONE, limits, engine=engine) as run:
        await run.collector.start(0)
        await scoring.reached()
        await run.collector.stop()
    Slow.gates = {}
    with Run(path, Slow, ONE, limits, engine=ScriptedEngine(adder)) as run:
        trajectories = await play_to_the_end(run)
        assert not run.engine.requests
    assert {t.stop_reason for t in trajectories} == {"wall"}


async def test_the_time_of_a_tool_that_was_cut_counts(fast_path: Path) -> None:
    """Each life gives a tool that may run again a part of the wall limit; together they are the whole of it."""

    class Slow(Gated):
        @tool(idempotent=True)
        async def add(self, number: int) -> str:
            """Adds."""
            await asyncio.sleep(3600)
            return ""

    path, limits, lives, over = fast_path / "journal.sqlite", Limits(wall=1.0), 0, False
    while not over:
        lives += 1
        with Run(path, Slow, ONE, limits, engine=ScriptedEngine(adder)) as run:
            await run.collector.start(0)
            await until(lambda run=run: run.collector.progress().in_tools == 2 or run.collector.progress().ready_groups)
            await asyncio.sleep(0.2)
            over = bool(run.collector.progress().ready_groups)
            await run.collector.stop()
            (slots,) = [group.slots for group in run.ledger.unfinished()] or [[]]
            for slot in slots:
                events = run.journal.submit(lambda c, s=slot.id: read_events(c, s, run.journal.blobs)).result(5)
                assert sum(getattr(event, "seconds", 0.0) for event in events) > 0.15 * lives
        assert lives < 20
    assert lives > 1
    with Run(path, Slow, ONE, limits, engine=ScriptedEngine(adder)) as run:
        trajectories = await play_to_the_end(run)
    assert {t.stop_reason for t in trajectories} == {"wall"}


async def test_a_kill_before_the_first_token_of_a_request_and_an_empty_reply_change_nothing(fast_path: Path) -> None:
    with Run(fast_path / "whole.sqlite", Shop, ONE, engine=ScriptedEngine(adder)) as run:
        whole = await play_to_the_end(run)

    class Empty(ScriptedEngine):
        """The first request of every life, and each that begins a turn, comes back with nothing."""

        seen: ClassVar[set[tuple[str, int]]] = set()

        async def _generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
            where = (request_id.partition("-")[0], len(token_ids))
            if where not in self.seen:
                self.seen.add(where)
                return Completion((), "abort")
            return await super()._generate(token_ids, sampling, request_id)

    path = fast_path / "journal.sqlite"
    with Run(path, Shop, ONE, engine=Empty(adder)) as run:
        await run.collector.start(0)
        await until(lambda: run.engine.requests)
        await run.collector.stop()
    with Run(path, Shop, ONE, engine=Empty(adder)) as run:
        resumed = await play_to_the_end(run)
    assert [view(t) for t in resumed] == [view(t) for t in whole]
    assert not sampled_again(path)
