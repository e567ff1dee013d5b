"""Tools run exactly once where it matters, whatever dies when."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.env import Env, ToolEnv, tool
from gspo_agent.env.contract import StepResult
from gspo_agent.messages import Message, assistant, call, user
from gspo_agent.rollout import schema
from gspo_agent.rollout.events import Begun, Observed, Sampled
from gspo_agent.rollout.journal import read_events
from gspo_agent.rollout.recorder import JournalRecorder
from gspo_agent.rollout.state import SAME, State
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import Segment, Status
from tests.rollout.scene import CHAT, Run, play_to_the_end, until, view

ONE = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)


class Bank(ToolEnv):
    """Every payment leaves a mark outside, which no restart takes back."""

    outside: ClassVar[list[str]] = []
    stop_at: ClassVar[str] = ""
    reached: ClassVar[asyncio.Event]

    def setup(self, task: dict[str, Any]) -> None:
        self.balance = 0

    def prompt(self, task: dict[str, Any]) -> str:
        return "pay"

    async def _happen(self, name: str) -> None:
        Bank.outside.append(name)
        if name == Bank.stop_at:
            Bank.reached.set()
            await asyncio.sleep(3600)

    @tool
    async def pay(self, amount: int) -> str:
        """Pays."""
        await self._happen(f"{self.episode_id} pay {amount}")
        self.balance += amount
        return f"paid {amount}, {self.balance} in all"

    @tool(idempotent=True)
    async def look(self, amount: int) -> str:
        """Looks."""
        await self._happen(f"{self.episode_id} look {amount}")
        return f"{self.balance} in all"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(self.balance)


def payer(prompt: Sequence[int], seed: int) -> list[int]:
    if sum(token == ByteChat.ASSISTANT for token in prompt) == 1:
        return CHAT.turn(
            "", call("pay", amount=1), call("pay", amount=2), call("look", amount=0), call("pay", amount=3)
        )
    return CHAT.turn("done")


async def killed_at(tmp: Path, env: type[Env], stop_at: str) -> Path:
    """The files of a run that was killed when `stop_at` had happened outside and not returned."""
    Bank.outside, Bank.stop_at, Bank.reached = [], stop_at, asyncio.Event()
    path = tmp / "alive" / "journal.sqlite"
    with Run(path, env, ONE, engine=ScriptedEngine(payer)) as run:
        await run.collector.start(0)
        async with asyncio.timeout(10):
            await Bank.reached.wait()
            await until(lambda: run.collector.progress().in_flight <= 1)
        await run.journal.transact(lambda connection: None)
        shutil.copytree(path.parent, tmp / "killed")
        await run.collector.stop()
    Bank.stop_at = ""
    return tmp / "killed" / "journal.sqlite"


async def go_on(path: Path, env: type[Env]) -> list[Any]:
    with Run(path, env, ONE, engine=ScriptedEngine(payer)) as run:
        return await play_to_the_end(run)


async def test_a_crash_in_the_second_call_of_four(fast_path: Path) -> None:
    """The first call's result is reused, the second is interrupted, the others run; the state is that of what ended."""
    path = await killed_at(fast_path, Bank, "1.0.0 pay 2")
    first, _ = await go_on(path, Bank)
    tools = [m for m in first.messages if m["role"] == "tool"]
    assert [m["outcome"] for m in tools] == ["ok", "interrupted", "ok", "ok"]
    assert [m["content"] for m in tools][::2] == ["paid 1, 1 in all", "1 in all"]
    assert tools[3]["content"] == "paid 3, 4 in all"
    assert first.reward == 4.0
    happened = [name for name in Bank.outside if name.startswith("1.0.0")]
    assert happened == ["1.0.0 pay 1", "1.0.0 pay 2", "1.0.0 look 0", "1.0.0 pay 3"]


async def test_twenty_megabytes_of_a_tool_and_six_of_a_state_come_back_whole(fast_path: Path) -> None:
    """Cut in the call after: the large result is answered from the record, nothing of the episode is left out, and
    what it holds is the same after another stop and start."""
    size = 20 * 1024 * 1024

    class Verbose(Bank):
        @tool
        async def pay(self, amount: int) -> str:
            """Pays."""
            await Bank.pay.function(self, amount)
            if amount != 1:
                return "paid"
            self.receipt = "r" * (6 * 1024 * 1024)
            return "p" * size

    path = fast_path / "journal.sqlite"
    Bank.outside, Bank.stop_at, Bank.reached = [], "1.0.0 pay 2", asyncio.Event()
    with Run(path, Verbose, ONE, engine=ScriptedEngine(payer)) as run:
        await run.collector.start(0)
        async with asyncio.timeout(30):
            await Bank.reached.wait()
        await run.collector.stop()
    Bank.stop_at = ""
    with Run(path, Verbose, ONE, engine=ScriptedEngine(payer)) as run:
        (slot,) = (s for group in run.ledger.unfinished() for s in group.slots if s.number == 0)
        episode = run.ledger.episode(slot)
        results = {call_id: record.result["content"] for call_id, record in episode.calls.items() if record.ended}
        assert results == {"1.0.0/0/0": "p" * size}
        assert episode.state is not None
        assert episode.state.value["attributes"]["receipt"] == "r" * (6 * 1024 * 1024)
        sampled = episode.trajectory.num_sampled
        played = await play_to_the_end(run)
    # No context holds it: the limit ends the episode, which keeps its tokens and is scored in its last state.
    assert [(t.stop_reason, t.num_sampled) for t in played] == [("context_tokens", sampled)] * 2
    assert played[0].reward == 4.0
    with Run(path, Verbose, ONE) as run:
        lease = await run.ledger.lease(1, 1, max_filtered=0)
        assert lease is not None
        assert [view(t) for t in lease.groups[0].trajectories] == [view(t) for t in played]


async def test_an_idempotent_call_runs_again(fast_path: Path) -> None:
    path = await killed_at(fast_path, Bank, "1.0.0 look 0")
    first, _ = await go_on(path, Bank)
    assert [m["outcome"] for m in first.messages if m["role"] == "tool"] == ["ok"] * 4
    assert first.reward == 6.0
    happened = [name for name in Bank.outside if name.startswith("1.0.0")]
    assert happened.count("1.0.0 look 0") == 2
    assert len(happened) == 5


class Counting(ToolEnv):
    """Its state is a number; its calls answer at once, or after a turn of the event loop."""

    def setup(self, task: dict[str, Any]) -> None:
        self.number = 0

    def prompt(self, task: dict[str, Any]) -> str:
        return "count"

    @tool(idempotent=True)
    async def again(self) -> str:
        """Counts; may run again."""
        self.number += 1
        return "once more"

    @tool
    async def quick(self) -> str:
        """Counts."""
        self.number += 1
        return "at once"

    @tool
    async def slow(self) -> str:
        """Counts, and takes its time."""
        self.number += 1
        await asyncio.sleep(0)
        return "in time"

    @tool(final=True)
    async def last(self) -> str:
        """Counts, and ends."""
        self.number += 1
        return "done"

    async def score(self, task: dict[str, Any], answer: str) -> float:
        self.number += 100
        await asyncio.sleep(0)
        return float(self.number)


def kinds_and_states(run: Run, slot: int = 1) -> list[tuple[str, Any]]:
    """Every event of a slot, and the state that is written with it."""
    events = run.journal.submit(lambda c: read_events(c, slot, run.journal.blobs)).result(5)
    states = [getattr(event, "state", None) for event in events]
    values = [state.value if isinstance(state, State) else None for state in states]
    return [(event.kind, value) for event, value in zip(events, values, strict=True)]


def kinds_and_numbers(run: Run, slot: int = 1) -> list[tuple[str, int | None]]:
    """Every event of a slot, and the number in the state that is written with it."""
    return [(kind, state and state["attributes"]["number"]) for kind, state in kinds_and_states(run, slot)]


async def recorded_of(
    path: Path, *calls: str, env: type[Env] | None = None, look: Callable[[Run], list[Any]] = kinds_and_numbers
) -> list[tuple[str, Any]]:
    """The events of an episode whose first turn makes these calls."""

    def play(prompt: Sequence[int], seed: int) -> list[int]:
        first = sum(token == ByteChat.ASSISTANT for token in prompt) == 1
        return CHAT.turn("", *map(call, calls)) if first else CHAT.turn("done")

    with Run(path, env or Counting, ONE, engine=ScriptedEngine(play, chunk=1000)) as run:
        await play_to_the_end(run)
        return look(run)


async def test_a_turn_whose_call_answers_at_once_is_three_rows_and_one_state(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observation has the result and the state, so they are not written, nor looked at, twice."""
    looked, get_state = [], ToolEnv.get_state
    monkeypatch.setattr(ToolEnv, "get_state", lambda env: looked.append(env) or get_state(env))
    found = await recorded_of(fast_path / "journal.sqlite", "quick")
    assert found[2:5] == [("sampled", None), ("call_begun", None), ("observed", 1)]
    assert len(looked) == 2 * 2  # at the reset and after the step, of two episodes


async def test_where_an_authors_own_step_goes_on_after_the_calls_their_ends_are_written_before_that(
    fast_path: Path,
) -> None:
    class Longer(Counting):
        logs_calls = True

        async def astep(self, action: Message) -> StepResult:
            return await super().astep(action)

    found = await recorded_of(fast_path / "journal.sqlite", "quick", env=Longer)
    assert found[2:6] == [("sampled", None), ("call_begun", None), ("call_ended", 1), ("observed", 1)]


async def test_an_idempotent_call_that_answers_at_once_is_no_row(fast_path: Path) -> None:
    found = await recorded_of(fast_path / "journal.sqlite", "again")
    assert found[2:4] == [("sampled", None), ("observed", 1)]


async def test_the_result_of_a_call_is_written_before_the_next_one_begins_with_the_state_that_it_left(
    fast_path: Path,
) -> None:
    found = await recorded_of(fast_path / "journal.sqlite", "quick", "again", "slow", "quick")
    assert found[3:] == [
        ("call_begun", None), ("call_ended", 1), ("call_begun", None), ("call_ended", 2),
        ("call_begun", None), ("call_ended", 3), ("call_begun", None), ("observed", 4),
        ("sampled", None), ("observed", None), ("ended", None),
    ]  # fmt: skip


async def test_the_state_after_a_final_call_is_from_before_its_score(fast_path: Path) -> None:
    found = await recorded_of(fast_path / "journal.sqlite", "last")
    assert found[3:] == [("call_begun", None), ("call_ended", 1), ("observed", None), ("ended", None)]


async def test_a_call_runs_only_once_its_intent_is_on_disk(fast_path: Path) -> None:
    """Seen from the file, at the moment the tool runs."""
    seen: list[str] = []

    class Peek(Bank):
        async def _happen(self, name: str) -> None:
            copy = fast_path / f"copy{len(seen)}"
            shutil.copytree(fast_path / "run", copy)
            with Run(copy / "journal.sqlite", Peek, ONE) as run:
                slot = next(s for g in run.ledger.unfinished() for s in g.slots if self.episode_id == s.trajectory().id)
                seen.extend(i for i, c in run.ledger.episode(slot).calls.items() if not c.ended)

        @tool
        async def look(self, amount: int) -> str:
            """Looks; not idempotent here."""
            await self._happen("")
            return ""

    with Run(fast_path / "run" / "journal.sqlite", Peek, ONE, engine=ScriptedEngine(payer)) as run:
        await play_to_the_end(run)
    assert sorted(seen) == sorted(f"1.{n}.0/0/{position}" for n in (0, 1) for position in range(4))


class Plain(Env):
    """Its whole step is one call."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        self.steps = 0
        return [user("go")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.steps += 1
        name = f"{self.episode_id} step"
        Bank.outside.append(name)
        if name == Bank.stop_at:
            Bank.reached.set()
            await asyncio.sleep(3600)
        return [user("and?")], 0.0, self.steps == 2, False, {"components": {"steps": float(self.steps)}}

    def get_state(self) -> Any:
        return self.steps

    def set_state(self, state: Any) -> None:
        self.steps = state


async def test_no_more_tokens_are_sampled_than_may_be_lost_while_the_journal_stands_still(fast_path: Path) -> None:
    sampled: Counter[str] = Counter()
    config, path = ONE.model_copy(update={"journal_tokens": 8}), fast_path / "run" / "journal.sqlite"
    engine = ScriptedEngine(lambda prompt, seed: CHAT.turn("x" * 50), chunk=3)
    engine.on_tokens = lambda request, position, count, version: sampled.update({request.split(".")[3]: count})
    gate = threading.Event()
    with Run(path, Bank, config, engine=engine) as run:
        await run.collector.start(0)
        await until(lambda: len(sampled) == 2)
        blocked = run.journal.submit(lambda connection: gate.wait(20))
        await until(lambda: all(r.stage == "journal" for r in run.collector._attempts.active.values()))
        with closing(schema.read_only(path)) as connection:
            query = "SELECT number, sum(length(token_ids) / 4) FROM events JOIN slots ON slots.id = slot "
            journaled = dict(connection.execute(query + "WHERE kind = 'sampled' GROUP BY slot").fetchall())
        for number in (0, 1):
            assert sampled[str(number)] - journaled.get(number, 0) <= config.journal_tokens
        gate.set()
        assert blocked.result(5)
        lease = await run.collector.lease(1, step=1)
        await run.collector.stop()
    assert [t.status for group in lease.groups for t in group.trajectories] == [Status.TERMINATED] * 2


async def test_an_interrupted_step_of_a_plain_environment_is_told_and_not_repeated(fast_path: Path) -> None:
    path = await killed_at(fast_path, Plain, "1.0.0 step")
    first, second = await go_on(path, Plain)
    assert "Interrupted" in first.messages[2]["content"]
    assert "Interrupted" not in second.messages[2]["content"]
    assert Bank.outside.count("1.0.0 step") == 3
    assert first.rewards[-1].components == {"steps": 2.0}


async def test_an_episode_without_a_way_back_starts_again_and_costs_no_attempt(fast_path: Path) -> None:
    class Forgetful(Bank):
        def setup(self, task: dict[str, Any]) -> None:
            self.balance = 0
            self.handle = object()

    path = await killed_at(fast_path, Forgetful, "1.0.0 pay 2")
    with Run(path, Forgetful, ONE.model_copy(update={"max_attempts": 1}), engine=ScriptedEngine(payer)) as run:
        first, second = await play_to_the_end(run)
        assert run.collector.progress().restarts == 1
        assert run.ledger.status().slots == {"done": 2, "restarted": 1}
    assert [first.id, second.id] == ["1.0.1", "1.1.0"]
    assert first.reward == 6.0


@pytest.mark.parametrize(("terminated", "reason"), [(True, "terminated"), (False, "environment")])
async def test_an_episode_that_was_over_needs_no_environment_to_end(
    fast_path: Path, terminated: bool, reason: str
) -> None:
    """Killed after the last observation and before the end: even without a state nothing is played again."""
    path = fast_path / "journal.sqlite"
    turn = Segment(CHAT.turn("done"), "policy", [-1.0] * 5, 0)
    with Run(path, Bank, ONE) as run:
        (group,) = await run.collector._create()
        for slot in group.slots:
            recorder = JournalRecorder(run.journal, run.ledger, slot)
            recorder.record(Begun(slot.seed, "shop", 0, 1))
            recorder.record(Observed(0, [user("go")], CHAT.open([user("go")], []), tools=[]))
            recorder.record(Sampled(0, 5, [turn], "r", "stop", action=assistant("done")))
            recorder.record(Observed(1, [], (), 0.5, terminated, not terminated))
    with Run(path, Bank, ONE, engine=ScriptedEngine(payer)) as run:
        trajectories = await play_to_the_end(run)
        assert run.engine.requests == []
    assert [(t.id, t.stop_reason, t.reward) for t in trajectories] == [("1.0.0", reason, 0.5), ("1.1.0", reason, 0.5)]


async def test_a_replay_that_answers_differently_fails_and_is_filled_again(fast_path: Path) -> None:
    class Moody(Env):
        state_level = "replay"
        mood: ClassVar[str] = "good"

        async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
            await super().areset(seed=seed)
            self.steps = 0
            return [user("go")], {}

        async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
            self.steps += 1
            over = self.steps == 2
            return ([] if over else [user(Moody.mood)]), 1.0, over, False, {}

    engine = ScriptedEngine(payer)
    path = fast_path / "journal.sqlite"
    with Run(path, Moody, ONE, engine=engine) as run:
        engine.hold_at = 5 + len(payer([256 + 2], 0)) + 6
        await run.collector.start(0)
        async with asyncio.timeout(10):
            await until(lambda: len(engine.held) >= 2)
        await run.collector.stop()
    Moody.mood = "bad"
    with Run(path, Moody, ONE, engine=ScriptedEngine(payer)) as run:
        first, second = await play_to_the_end(run)
        (cause,) = run.ledger.status().failures
    assert cause.startswith("ReplayError: replay differs at turn 1")
    assert "good" in cause
    assert "bad" in cause
    assert [first.attempt, second.attempt] == [1, 1]
    assert first.status is Status.TERMINATED


async def test_a_state_that_is_too_large_or_unchanged(fast_path: Path) -> None:
    with Run(fast_path / "journal.sqlite", Bank, ONE) as run:
        (group,) = await run.collector._create()
        recorder = JournalRecorder(run.journal, run.ledger, group.slots[0], max_state_bytes=1000)
        env = Plain()
        env.steps = 5  # type: ignore[attr-defined]
        state = await recorder.snapshot(env)
        assert isinstance(state, State)
        recorder.episode.state = state
        assert await recorder.snapshot(env) is SAME
        env.steps = "x" * 2000  # type: ignore[attr-defined]
        assert await recorder.snapshot(env) is None
        assert "2002 bytes" in str(recorder.state_problem)
        env.steps = object()  # type: ignore[attr-defined]
        assert await recorder.snapshot(env) is None
        assert "neither JSON nor bytes" in str(recorder.state_problem)


@pytest.mark.parametrize("secret", ["hunter2hunter2"])
async def test_a_secret_argument_is_not_in_the_record_of_the_call(fast_path: Path, secret: str) -> None:
    class Login(Bank):
        @tool(secrets=["amount"])
        async def pay(self, amount: str) -> str:
            """Pays."""
            return f"welcome {amount}"

    def login(prompt: Sequence[int], seed: int) -> list[int]:
        first = sum(token == ByteChat.ASSISTANT for token in prompt) == 1
        return CHAT.turn("", call("pay", amount=secret)) if first else CHAT.turn("done")

    with Run(fast_path / "journal.sqlite", Login, ONE, engine=ScriptedEngine(login)) as run:
        await play_to_the_end(run)
        kinds = "('call_begun', 'call_ended', 'observed')"
        query = f"SELECT CAST(data AS TEXT) FROM events WHERE kind IN {kinds}"
        rows = run.journal.submit(lambda c: c.execute(query).fetchall()).result(5)
    assert rows
    assert not [row for row in rows if secret in row[0]]


async def test_a_state_that_an_environment_changes_in_place_is_written_after_every_step(fast_path: Path) -> None:
    class Board(Env):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.board = {"moves": 0}
            return [user("move")], {}

        def step(self, action: Message) -> Any:
            self.board["moves"] += 1
            return [user("again")], 0.0, False, False, {}

        def get_state(self) -> Any:
            return self.board

        def set_state(self, state: Any) -> None:
            self.board = state

    engine = ScriptedEngine(lambda prompt, seed: CHAT.turn("so"))
    with Run(fast_path / "journal.sqlite", Board, ONE, Limits(turns=3), engine) as run:
        await play_to_the_end(run)
        states = [state for kind, state in kinds_and_states(run) if kind == "observed"]
    assert states == [{"moves": moves} for moves in range(4)]


async def test_an_authors_own_asynchronous_state_is_the_one_that_a_call_leaves(fast_path: Path) -> None:
    class Own(Counting):
        async def aget_state(self) -> Any:
            return {"own": self.number}

    found = await recorded_of(fast_path / "journal.sqlite", "quick", "quick", env=Own, look=kinds_and_states)
    assert [state for kind, state in found if kind == "call_ended"] == [{"own": 1}, {"own": 2}]
