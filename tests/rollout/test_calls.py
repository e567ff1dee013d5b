"""What counts as one call, at which level a record of it is used, and what of its secrets is written down."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.config import RolloutConfig
from gspo_agent.env import Env, ToolEnv, tool
from gspo_agent.env import call_id as this_call
from gspo_agent.messages import Message, call, user
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import Status
from tests.rollout.scene import CHAT, Run, play_to_the_end, until, view

ONE = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)


class Steps(ToolEnv):
    """Two turns with a call each. An episode's `stop_at`th call, and those after it, never return."""

    ran: ClassVar[list[str]]
    calls: ClassVar[Counter[str]]
    """Episode -> calls of it."""
    stop_at: ClassVar[int]

    def setup(self, task: dict[str, Any]) -> None:
        self.taken: list[int] = []

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    async def take(self, number: int) -> str:
        """Take."""
        await happen(this_call())
        self.taken.append(number)
        return str(sum(self.taken))

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(sum(self.taken))


async def happen(what: str) -> None:
    Steps.ran.append(what)
    episode = this_call().rsplit("/", 2)[0]
    Steps.calls[episode] += 1
    if 0 < Steps.stop_at <= Steps.calls[episode]:
        await asyncio.sleep(3600)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Steps.ran, Steps.calls, Steps.stop_at = [], Counter(), 0


def taker(prompt: Sequence[int], seed: int) -> list[int]:
    turn = sum(token == ByteChat.ASSISTANT for token in prompt)
    return CHAT.turn("", call("take", number=turn)) if turn < 3 else CHAT.turn("done")


def a_run(path: Path, env: type[Env], policy: Any = taker) -> Run:
    return Run(path / "journal.sqlite", env, ONE, engine=ScriptedEngine(policy))


async def cut_inside_calls(path: Path, env: type[Env], number: int, policy: Any = taker) -> str:
    """Stops a run, without grace, with both episodes inside their `number`th call."""
    Steps.stop_at = number
    Steps.calls.clear()
    with a_run(path, env, policy) as run:
        await run.collector.start(0)
        await until(lambda: len(Steps.ran) == 2 * number)
        await run.collector.stop()
    Steps.stop_at = 0
    return run.journal.run_id


class Wrapped(Steps):
    """Its own step around that of ToolEnv: the whole of it is one call."""

    async def astep(self, action: Message) -> Any:
        return await super().astep(action)


async def test_a_step_around_that_of_toolenv_is_one_call_whose_id_is_used_once(fast_path: Path) -> None:
    assert not Wrapped.logs_calls
    run_id = await cut_inside_calls(fast_path, Wrapped, 1)
    assert sorted(Steps.ran) == [f"{run_id}/1.{n}.0/0/0/0" for n in (0, 1)]
    with a_run(fast_path, Wrapped) as run:
        trajectories = await play_to_the_end(run)
    assert [["Interrupted" in m["content"] for m in t.messages].count(True) for t in trajectories] == [1, 1]
    assert len(set(Steps.ran)) == len(Steps.ran) == 4
    assert {t.reward for t in trajectories} == {2.0}


class Repeated(Steps):
    """Tools at the level "replay": nothing of an instance is kept, so all that it did is done again."""

    state_level = "replay"


class Plain(Env):
    """A step that is one call, without a state to keep."""

    state_level = "replay"

    async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.steps = 0
        return [user("go")], {}

    async def astep(self, action: Message) -> Any:
        await happen(this_call())
        self.steps += 1
        return [user("and?")], float(self.steps), self.steps == 2, False, {}


@pytest.mark.parametrize("kind", [Repeated, Plain])
async def test_at_the_level_replay_calls_run_again_under_the_ids_they_had(fast_path: Path, kind: type[Env]) -> None:
    for name in ("whole", "cut"):
        (fast_path / name).mkdir()
    with a_run(fast_path / "whole", kind) as run:
        whole = await play_to_the_end(run)
    Steps.ran.clear()
    await cut_inside_calls(fast_path / "cut", kind, 2)
    before = sorted(Steps.ran)
    with a_run(fast_path / "cut", kind) as run:
        trajectories = await play_to_the_end(run)
        assert run.ledger.status().failures == {}
        query = "SELECT count(*), count(DISTINCT data) FROM events WHERE kind = 'call_ended'"
        assert run.journal.submit(lambda c: c.execute(query).fetchone()).result(5) in [(4, 4), (0, 0)]
    assert [view(t) for t in trajectories] == [view(t) for t in whole]
    assert sorted(Steps.ran) == sorted(before * 2)


@pytest.mark.parametrize("level", ["state", "replay", "none"])
async def test_a_plain_step_has_an_id_that_no_other_step_of_any_run_has(fast_path: Path, level: Any) -> None:
    own = {"get_state": lambda self: self.steps, "set_state": lambda self, state: setattr(self, "steps", state)}
    kind = type("Kept", (Plain,), {"state_level": level, **(own if level == "state" else {})})
    ids = []
    for name in ("one", "two"):
        (fast_path / name).mkdir()
        with a_run(fast_path / name, kind) as run:
            await play_to_the_end(run)
            ids += [f"{run.journal.run_id}/1.{n}.0/{turn}/0" for n in (0, 1) for turn in (0, 1)]
    assert sorted(Steps.ran) == sorted(ids)
    assert len(set(ids)) == 8


SECRET = "hunter2hunter2"


class Login(Steps):
    @tool(secrets=["word"], idempotent=True)
    async def enter(self, word: str, times: int) -> str:
        """Enter."""
        await happen(word)
        self.taken.append(len(word))
        if times == 3:
            raise ConnectionError(f"{word} was refused")
        return f"welcome {word}"


def typist(times: Any, word: Any = SECRET) -> Any:
    def play(prompt: Sequence[int], seed: int) -> list[int]:
        if sum(token == ByteChat.ASSISTANT for token in prompt) == 1:
            return CHAT.turn(f"I try {word}.", call("enter", word=word, times=times))
        return CHAT.turn("done")

    return play


def written(run: Run) -> str:
    """All text of the journal's events."""
    rows = run.journal.submit(lambda c: c.execute("SELECT kind, CAST(data AS TEXT) FROM events").fetchall()).result(5)
    assert {"sampled", "ended"} <= {kind for kind, _ in rows}
    return "\n".join(text for _, text in rows)


@pytest.mark.parametrize(("times", "word"), [(1, SECRET), ("many", SECRET), (3, SECRET), (1, 31415926)])
async def test_a_secret_is_in_no_text_of_the_journal(fast_path: Path, times: Any, word: Any) -> None:
    """Not where the call ran, nor where a connection was lost, nor where what was typed is no argument for it."""
    with a_run(fast_path, Login, typist(times, word)) as run:
        if times == 3:
            run.collector._failures._max_failed = 1e9  # type: ignore[attr-defined]
            await run.collector.start(0)
            await until(lambda: run.ledger.status().groups.get("given_up"))
            await run.collector.stop()
        else:
            first, _ = await play_to_the_end(run)
            typed = first.messages[1]
            assert (typed["content"], len(first.messages)) == ("I try [redacted].", 4)
            assert typed["tool_calls"][0]["function"]["arguments"] == {"word": "[redacted]", "times": times}
        text = written(run)
    assert "[redacted]" in text
    assert str(word) not in text


async def test_a_call_with_a_secret_goes_on_after_a_cut_with_its_value(fast_path: Path) -> None:
    await cut_inside_calls(fast_path, Login, 1, typist(1))
    Steps.ran.clear()
    with a_run(fast_path, Login, typist(1)) as run:
        trajectories = await play_to_the_end(run)
        assert SECRET not in written(run)
    assert {(t.status, t.reward) for t in trajectories} == {(Status.TERMINATED, float(len(SECRET)))}
    assert Steps.ran == [SECRET, SECRET]
