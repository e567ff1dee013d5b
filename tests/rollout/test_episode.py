"""The agent loop: the same episode however it is cut, and one typed reason for every end."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.env import Env, ToolEnv, tool
from gspo_agent.errors import EngineError, EnvError, Unscored
from gspo_agent.messages import Message, call, user
from gspo_agent.rollout import episode as module
from gspo_agent.rollout.episode import run_episode
from gspo_agent.rollout.recorder import Recorder
from gspo_agent.sandbox import SandboxSettings, share
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import Status, Trajectory, weight_version
from tests.rollout.scene import CHAT, Guess, Run, Shop, guesser, play_to_the_end, sampled_again, shopper, until, view

ONE = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, journal_tokens=7, filter_zero_variance=False)


def _at_rest(run: Run) -> bool:
    """Every episode is over or waits where the engine holds it."""
    progress = run.collector.progress()
    return bool(progress.ready_groups) or 0 < progress.in_flight == len(run.engine.held)


def new_weights(version: int) -> Weights:
    return Weights(version, None, lambda: ())


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
@pytest.mark.parametrize(("env", "answer"), [(Shop, shopper), (Guess, guesser)])
async def test_interruption_at_any_token_changes_only_weight_versions(
    fast_path: Path, env: type[Env], answer: Any, every: int
) -> None:
    """Cut at every token, or every so many: stopped in good order, or killed (a copy of the files then is what
    a kill leaves); each goes on in a new process's place, under new weights."""
    with Run(fast_path / "whole" / "journal.sqlite", env, ONE, engine=ScriptedEngine(answer)) as run:
        whole = await play_to_the_end(run)
    positions = {int(position) for t in whole for row in t.rows() for position in row.sampled.nonzero()[0]}
    versions = set()
    for position in sorted(positions)[::every]:
        path = fast_path / f"{position}" / "journal.sqlite"
        engine = ScriptedEngine(answer)
        engine.hold_at = position
        with Run(path, env, ONE, engine=engine) as run:
            await run.collector.start(0)
            await until(lambda run=run: _at_rest(run))
            await run.journal.transact(lambda connection: None)
            shutil.copytree(path.parent, fast_path / f"{position}-killed")
            await run.collector.stop()
        for place in (path, fast_path / f"{position}-killed" / "journal.sqlite"):
            again = ScriptedEngine(answer, weight_version=weight_version(2, 0))
            with Run(place, env, ONE, engine=again) as run:
                resumed = await play_to_the_end(run)
            assert [view(t) for t in resumed] == [view(t) for t in whole], (position, place)
            assert not sampled_again(place)
            versions |= {v for t in resumed for row in t.rows() for v in row.weight_versions.tolist()}
        shutil.rmtree(path.parent)
        shutil.rmtree(fast_path / f"{position}-killed")
    assert versions == {-1, 0, weight_version(2, 0)}


async def test_cuts_in_the_same_process_change_nothing() -> None:
    """The engine cuts every request at every position: each comes back with one token or none."""

    async def play(engine: ScriptedEngine, journal_tokens: int) -> Trajectory:
        trajectory = Trajectory(1, 0, 0, seed=5)
        return await run_episode(
            trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 1, "b": 2}, limits=Limits(),
            journal_tokens=journal_tokens,
        )  # fmt: skip

    whole = await play(ScriptedEngine(shopper), 1000)
    engine = ScriptedEngine(shopper)
    engine.cut_at = set(range(10_000))
    assert view(await play(engine, 1000), versions=True) == view(whole, versions=True)
    assert len(engine.requests) == whole.num_sampled > 10
    bounded = ScriptedEngine(shopper)
    assert view(await play(bounded, 3), versions=True) == view(whole, versions=True)
    assert max(delivered for _, _, delivered in bounded.requests) == 3


async def test_one_turn_may_hold_several_versions() -> None:
    engine = ScriptedEngine(shopper, chunk=2, weight_version=3)
    trajectory = Trajectory(1, 0, 0, seed=5)
    playing = asyncio.create_task(
        run_episode(trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 1, "b": 2}, limits=Limits())
    )
    while not playing.done():
        await asyncio.sleep(0)
        await engine.update_weights(new_weights(engine.weight_version + 1))
    versions = [s.weight_version for s in trajectory.segments if s.sampled and s.turn == 0]
    assert len(versions) > 3
    assert versions == sorted(versions)
    assert trajectory.num_sampled == sum(delivered for *_, delivered in engine.requests)


def talker(prompt: Sequence[int], seed: int) -> list[int]:
    return CHAT.turn("x" * 30, call("add", number=1))


@pytest.mark.parametrize(
    ("limits", "reason", "sampled"),
    [
        ({"turns": 2}, "turns", 152),
        ({"turn_tokens": 40}, "turn_tokens", 40),
        ({"turn_tokens": 76, "turns": 3}, "turns", 228),
        ({"episode_tokens": 100}, "episode_tokens", 100),
        ({"context_tokens": 480}, "context_tokens", None),
        ({"tool_calls": 2}, "tool_calls", 228),
        ({"wall": 1e-9}, "wall", 0),
    ],
)
@pytest.mark.parametrize("journal_tokens", [1, 13, 1000])
async def test_every_limit_truncates_with_its_own_reason_and_is_scored(
    limits: dict[str, Any], reason: str, sampled: int | None, journal_tokens: int
) -> None:
    trajectory = Trajectory(1, 0, 0, seed=5)
    engine = ScriptedEngine(talker)
    await run_episode(
        trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 0, "b": 0},
        limits=Limits(**{"turn_tokens": 1000, **limits}), journal_tokens=journal_tokens,
    )  # fmt: skip
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, reason)
    assert set(trajectory.rewards[-1].components) == {"right", "said"}
    if sampled is not None:
        assert trajectory.num_sampled == sampled
    if reason == "context_tokens":
        assert trajectory.num_tokens - (0 if trajectory.segments[-1].sampled else len(trajectory.segments[-1])) <= 480


async def test_the_engine_is_never_asked_for_more_than_the_context_holds() -> None:
    class Watched(ScriptedEngine):
        asked = 0

        async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
            self.asked = max(self.asked, len(token_ids) + sampling.max_new_tokens)
            return await super().generate(token_ids, sampling, request_id=request_id)

    engine = Watched(talker, context_tokens=500)
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 0, "b": 0}, limits=Limits())
    assert trajectory.stop_reason == "context_tokens"
    assert engine.asked <= 500


async def test_what_an_engine_keeps_of_its_prompts_stays_as_it_was_and_holds_up_no_episode() -> None:
    class Keeper(ScriptedEngine):
        views: ClassVar[list[Any]] = []

        async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
            self.views.append((np.asarray(token_ids, np.int32), list(token_ids)))
            return await super().generate(token_ids, sampling, request_id=request_id)

    engine = Keeper(shopper)
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 1, "b": 2}, limits=Limits())
    assert trajectory.status is Status.TERMINATED, trajectory.stop_reason
    assert len(engine.views) > 2
    for view_then, prompt in engine.views:
        assert view_then.tolist() == prompt == trajectory.token_ids()[: len(prompt)].tolist()


class Strict(ScriptedEngine):
    """Keeps what each episode asked for, and refuses, as servers do, what its context cannot hold."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[tuple[str, int, int]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        episode = request_id.rpartition("-")[0].split(".", 2)[2]
        self.asked.append((episode, len(token_ids), sampling.max_new_tokens))
        if len(token_ids) + sampling.max_new_tokens > self.context_tokens:
            raise EngineError(f"{len(token_ids)} + {sampling.max_new_tokens} tokens do not fit")
        return await super().generate(token_ids, sampling, request_id=request_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"turns": 3},
        {"turn_tokens": 40},
        {"turn_tokens": 76, "turns": 3},
        {"episode_tokens": 200},
        {"context_tokens": 560},
        {"tool_calls": 2},
    ],
)
async def test_no_budget_begins_again_after_a_cut(fast_path: Path, changes: dict[str, int]) -> None:
    """Cut in life after life, a few tokens further each time: no request asks for more than its turn, its episode and
    the context have left, and the whole is what an uncut episode has: tokens, turns, tool history and stop reason."""
    limits = Limits(**{"turn_tokens": 1000, "context_tokens": 4096, **changes})
    wide = ONE.model_copy(update={"journal_tokens": 1000})
    with Run(fast_path / "whole.sqlite", Shop, wide, limits, engine=ScriptedEngine(talker)) as run:
        whole = await play_to_the_end(run)
    asked: list[tuple[str, int, int]] = []
    position, lives, over = 0, 0, False
    while not over:
        position, lives = position + 37, lives + 1
        engine = Strict(talker, context_tokens=limits.context_tokens)
        engine.hold_at = position
        with Run(fast_path / "cut.sqlite", Shop, wide, limits, engine=engine) as run:
            await run.collector.start(0)
            await until(lambda run=run: _at_rest(run))
            over = bool(run.collector.progress().ready_groups)
            await run.collector.stop()
        asked += engine.asked
    with Run(fast_path / "cut.sqlite", Shop, wide, limits, engine=Strict(talker)) as run:
        resumed = await play_to_the_end(run)
        assert not run.engine.requests
    assert lives > 4
    assert [view(t) for t in resumed] == [view(t) for t in whole]
    assert {t.stop_reason for t in whole} <= {*changes, "turn_tokens"}
    sampled = {t.id: t.rows()[0].sampled for t in resumed}
    for episode, start, num_tokens in asked:
        before = sampled[episode][:start]
        turn = start - int((~before).nonzero()[0][-1]) - 1
        assert num_tokens <= limits.turn_tokens - turn
        assert num_tokens <= (limits.episode_tokens or 10**9) - before.sum()
        assert start + num_tokens <= limits.context_tokens


async def test_a_request_that_comes_back_empty_loses_no_earlier_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may take back a request that waits and answer with nothing, at any point and several times."""
    monkeypatch.setattr(module, "_EMPTY_REPLY_PAUSE", 0.0)

    class Retracts(ScriptedEngine):
        taken_back: ClassVar[Counter[int]] = Counter()

        async def _generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
            self.taken_back[len(token_ids)] += 1
            if self.taken_back[len(token_ids)] < 3:
                return Completion((), "abort")
            return await super()._generate(token_ids, sampling, request_id)

    def start() -> Trajectory:
        return Trajectory(1, 0, 0, seed=5)

    whole, cut = start(), start()
    engine = Retracts(shopper)
    for trajectory, by in ((whole, ScriptedEngine(shopper)), (cut, engine)):
        await run_episode(
            trajectory, env=Shop(), chat=CHAT, engine=by, task={"a": 1, "b": 2}, limits=Limits(), journal_tokens=9
        )
    assert view(cut, versions=True) == view(whole, versions=True)
    assert len(engine.taken_back) > 5
    assert set(engine.taken_back.values()) == {3}


async def test_a_token_keeps_the_version_that_sampled_it_when_an_update_lands_on_the_way() -> None:
    """One update between the client's sending and the first token, one between the last token and the reply."""

    class Updated(ScriptedEngine):
        truth: ClassVar[list[int]] = []

        async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
            await self.update_weights(new_weights(self.weight_version + 1))
            completion = await super().generate(token_ids, sampling, request_id=request_id)
            self.truth += [self.weight_version] * sum(map(len, completion.segments))
            await self.update_weights(new_weights(self.weight_version + 1))
            return completion

    engine = Updated(shopper)
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 1, "b": 2}, limits=Limits(), journal_tokens=10
    )
    (row,) = trajectory.rows()
    assert row.weight_versions[row.sampled].tolist() == engine.truth
    assert len(set(engine.truth)) == len(engine.requests) > 3


UNUSABLE = {
    "an unknown tool": [call("nope", number=1)],
    "no arguments that fit": [call("add", nmuber=1)],
    "no name": b'{"arguments": {"number": 1}}',
    "no JSON": b"add(1)",
    "text after the call": b'{"name": "add", "arguments": {"number": 1}} please',
    "a call that is not closed": None,
}


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_calls_that_cannot_be_run_any_number_in_a_row_neither_end_nor_fail_nor_loop(kind: str) -> None:
    bad = UNUSABLE[kind]

    def stubborn(prompt: Sequence[int], seed: int) -> list[int]:
        if bad is None:
            return [ByteChat.CALL, *b'{"name": "add"', ByteChat.END]
        return [ByteChat.CALL, *bad, ByteChat.CALL_END, ByteChat.END] if isinstance(bad, bytes) else CHAT.turn("", *bad)

    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Shop(), chat=CHAT, engine=ScriptedEngine(stubborn), task={"a": 1, "b": 2},
        limits=Limits(turns=7, tool_calls=100),
    )  # fmt: skip
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, "turns")
    told = [m for m in trajectory.messages if m["role"] == "tool"]
    assert len(told) == 7
    assert {m["outcome"] for m in told} == {"error"}
    assert all(m["content"].startswith("Error: ") for m in told)
    assert set(trajectory.rewards[-1].components) == {"right", "said"}


@pytest.mark.parametrize("changes", [{"turn_tokens": 25}, {"context_tokens": 254}, {"episode_tokens": 25}])
async def test_a_call_that_a_limit_cut_in_two_is_that_limit_and_no_mistake_of_the_model(
    changes: dict[str, int],
) -> None:
    Shop.log.clear()
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Shop(), chat=CHAT, engine=ScriptedEngine(lambda p, s: CHAT.turn("", call("add", number=1))),
        task={"a": 1, "b": 0}, limits=Limits(**changes),
    )  # fmt: skip
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, next(iter(changes)))
    assert trajectory.segments[-1].sampled
    assert [m["role"] for m in trajectory.messages] == ["user"]
    assert not Shop.log


def killed_judge() -> float:
    subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], check=True)
    return 0.0


def raising(error: Exception) -> Callable[[], float]:
    def judge() -> float:
        raise error

    return judge


@pytest.mark.parametrize(
    "judge",
    [
        killed_judge,
        raising(TimeoutError("no verdict after 60 s")),
        raising(ConnectionResetError("peer")),
        raising(Unscored("the judge is gone")),
        lambda: None,
        lambda: "nan",
        lambda: float("nan"),
        lambda: float("-inf"),
        lambda: {"right": 1.0, "style": float("nan")},
    ],
)
@pytest.mark.parametrize("limit", [{}, {"turns": 1}])
async def test_a_judge_without_a_verdict_fails_the_episode_and_is_never_reward_0(
    judge: Callable[[], Any], limit: dict[str, int]
) -> None:
    """Whether the episode ended by itself or by a limit."""

    class Judged(Shop):
        def score(self, task: dict[str, Any], answer: str) -> Any:
            return judge()

    answer = talker if limit else (lambda prompt, seed: CHAT.turn("done"))
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Judged(), chat=CHAT, engine=ScriptedEngine(answer), task={"a": 0, "b": 0},
        limits=Limits(**limit),
    )  # fmt: skip
    assert trajectory.status is Status.FAILED
    assert "score" in str(trajectory.stop_reason)
    assert not trajectory.rewards


async def test_a_turn_without_a_bridge_is_truncated_and_scored() -> None:
    def unclosed(prompt: Sequence[int], seed: int) -> list[int]:
        return [*b"a", ByteChat.CALL, *b'{"name": "add", "arguments": {"number": 1}}', ByteChat.CALL_END, 0]

    class StopsAtZero(ByteChat):
        stop_token_ids = (0,)

    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Shop(), chat=StopsAtZero(), engine=ScriptedEngine(unclosed), task={"a": 1, "b": 0},
        limits=Limits(),
    )  # fmt: skip
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, "unclosed_turn")
    assert trajectory.messages[-1]["role"] == "tool"
    assert trajectory.segments[-1].sampled
    assert trajectory.rewards


@pytest.mark.parametrize("finish", ["length", "abort"])
async def test_a_stop_token_ends_the_turn_whatever_the_engine_says(finish: Any) -> None:
    class Late(ScriptedEngine):
        async def _generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
            completion = await super()._generate(token_ids, sampling, request_id)
            return Completion(completion.segments, finish)

    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(trajectory, env=Shop(), chat=CHAT, engine=Late(shopper), task={"a": 1, "b": 2}, limits=Limits())
    assert trajectory.status is Status.TERMINATED


class Broken(ToolEnv):
    def prompt(self, task: dict[str, Any]) -> str:
        return "go"

    @tool
    async def add(self, number: int) -> str:
        """Adds."""
        raise EnvError("the till is on fire")

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float("nan")


@pytest.mark.parametrize(
    ("answer", "cause"),
    [(talker, "EnvError: the till is on fire"), (lambda p, s: CHAT.turn("done"), "Unscored: Broken.score")],
)
async def test_a_fault_of_the_environment_fails_the_episode_and_names_the_cause(answer: Any, cause: str) -> None:
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(trajectory, env=Broken(), chat=CHAT, engine=ScriptedEngine(answer), task={}, limits=Limits())
    assert trajectory.status is Status.FAILED
    assert trajectory.stop_reason is not None
    assert trajectory.stop_reason.startswith(cause)
    assert not trajectory.rewards


async def test_an_engine_that_fails_or_says_nothing_fails_the_episode() -> None:
    class Silent(ScriptedEngine):
        async def _generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
            return Completion((), "stop")

    failing = ScriptedEngine(shopper)
    failing.fail_next = 1
    for engine, cause in ((failing, "scripted failure"), (Silent(shopper), "sampled nothing")):
        trajectory = Trajectory(1, 0, 0, seed=5)
        await run_episode(trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 1, "b": 2}, limits=Limits())
        assert trajectory.status is Status.FAILED
        assert cause in str(trajectory.stop_reason)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_the_wall_limit_fails_an_environment_whose_reset_hangs(asynchronous: bool) -> None:
    import time

    class Sluggish(Shop):
        async def setup(self, task: dict[str, Any]) -> None:
            await asyncio.sleep(3600)

    class Stiff(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            time.sleep(2)

    env = Sluggish() if asynchronous else Stiff()
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=env, chat=CHAT, engine=ScriptedEngine(shopper), task={"a": 1, "b": 2}, limits=Limits(wall=0.1)
    )
    assert trajectory.status is Status.FAILED
    assert "reset took longer than limits.wall, 1 s" in str(trajectory.stop_reason)


class Flood(ToolEnv):
    """A tool that prints far more than any context holds; so does the prompt, if the task says so."""

    def prompt(self, task: dict[str, Any]) -> str:
        return "a" * task.get("length", 1)

    @tool
    def pour(self) -> str:
        """Pour."""
        return "b" * 100_000

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 0.5


class Measured(ByteChat):
    longest = 0

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        self.longest = max(self.longest, *(len(message["content"]) for message in messages))
        return super().open(messages, tools)

    def extend(self, token_ids: Any, turn_start: int, messages: list[Message], tools: Any) -> list[int] | None:
        self.longest = max(self.longest, *(len(message["content"]) for message in messages))
        return super().extend(token_ids, turn_start, messages, tools)


async def test_what_cannot_fit_by_its_length_is_never_tokenised() -> None:
    chat, limits = Measured(), Limits(context_tokens=1000)
    engine = ScriptedEngine(lambda prompt, seed: CHAT.turn("", call("pour")))
    poured = Trajectory(0, 0, 0, seed=1)
    await run_episode(poured, env=Flood(), chat=chat, engine=engine, task={}, limits=limits)
    assert (poured.status, poured.stop_reason, poured.reward) == (Status.TRUNCATED, "context_tokens", 0.5)
    begun = Trajectory(0, 1, 0, seed=1)
    await run_episode(begun, env=Flood(), chat=chat, engine=engine, task={"length": 100_000}, limits=limits)
    assert begun.status is Status.FAILED
    assert "longer than context_tokens = 1000 can hold; shorten the task" in str(begun.stop_reason)
    assert chat.longest == 1


async def test_an_episode_that_ended_has_ended_however_long_its_last_answer_is() -> None:
    class Last(Flood):
        @tool(final=True)
        def submit(self) -> str:
            """Submit."""
            return "c" * 100_000

    trajectory = Trajectory(0, 0, 0, seed=1)
    await run_episode(
        trajectory, env=Last(), chat=CHAT, engine=ScriptedEngine(lambda p, s: CHAT.turn("", call("submit"))), task={},
        limits=Limits(context_tokens=1000),
    )  # fmt: skip
    assert (trajectory.status, trajectory.stop_reason, trajectory.reward) == (Status.TERMINATED, "terminated", 0.5)


async def test_the_wall_limit_ends_a_tool_and_a_request_that_hang() -> None:
    class Slow(ToolEnv):
        def prompt(self, task: dict[str, Any]) -> str:
            return "go"

        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            await asyncio.sleep(3600)
            return ""

        def score(self, task: dict[str, Any], answer: str) -> float:
            return 0.5

    hung = ScriptedEngine(talker)
    hung.hold_at = 20
    for engine, sampled in ((ScriptedEngine(talker), 76), (hung, None)):
        trajectory = Trajectory(1, 0, 0, seed=5)
        await run_episode(
            trajectory, env=Slow(), chat=CHAT, engine=engine, task={}, limits=Limits(wall=0.1), renew=Slow
        )
        assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, "wall")
        assert trajectory.reward == 0.5
        assert sampled is None or trajectory.num_sampled == sampled


async def test_a_tool_past_its_deadline_leaves_a_fresh_instance_at_the_last_state() -> None:
    import time

    made: list[Env] = []

    class Stuck(ToolEnv):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def setup(self, task: dict[str, Any]) -> None:
            self.done: list[str] = []

        def prompt(self, task: dict[str, Any]) -> str:
            return "go"

        @tool(timeout=0.05)
        def add(self, number: int) -> str:
            """Adds."""
            if number == 2:
                time.sleep(0.5)
            self.done.append(str(number))
            return "fine"

        def score(self, task: dict[str, Any], answer: str) -> float:
            return float(self.done == ["1", "3"])

    def three(prompt: Sequence[int], seed: int) -> list[int]:
        turn = sum(token == ByteChat.ASSISTANT for token in prompt)
        return CHAT.turn("", call("add", number=turn)) if turn < 4 else CHAT.turn("done")

    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Stuck(), chat=CHAT, engine=ScriptedEngine(three), task={}, limits=Limits(), renew=Stuck
    )
    assert [m.get("outcome") for m in trajectory.messages if m["role"] == "tool"] == ["ok", "timeout", "ok"]
    assert trajectory.reward == 1.0
    assert len(made) == 2


async def test_no_request_id_is_a_prefix_of_another() -> None:
    recorders = [Recorder(Trajectory(group, index, 0, seed=0)) for group in (1, 10, 11) for index in (0, 1, 10)]
    ids = [recorder.next_request(8) for recorder in recorders for _ in range(12)]
    assert len(set(ids)) == len(ids)
    assert not [(a, b) for a in ids for b in ids if a != b and b.startswith(a)]


async def test_a_step_that_says_nothing_and_does_not_end_is_an_error() -> None:
    class Mute(Env):
        async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
            await super().areset(seed=seed)
            return [user("go")], {}

        async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
            return [], 0.0, False, False, {}

    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(trajectory, env=Mute(), chat=CHAT, engine=ScriptedEngine(talker), task={}, limits=Limits())
    assert "returned no message" in str(trajectory.stop_reason)


@pytest.mark.parametrize(("reward", "component"), [(float("nan"), 1.0), (1.0, float("inf"))])
async def test_a_reward_that_is_not_finite_is_no_reward(reward: float, component: float) -> None:
    class Odd(Env):
        async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
            await super().areset(seed=seed)
            return [user("go")], {}

        async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
            return [], reward, True, False, {"components": {"right": component}}

    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(trajectory, env=Odd(), chat=CHAT, engine=ScriptedEngine(talker), task={}, limits=Limits())
    assert trajectory.status is Status.FAILED
    assert str(trajectory.stop_reason).startswith("Unscored")
    assert not trajectory.rewards


@pytest.mark.parametrize("limit", [1, 9])
async def test_finite_rewards_whose_sum_is_not_are_no_reward(limit: int) -> None:
    """The ledger would refuse such an end, in this life and in every later one."""

    class Generous(Env):
        steps = 0

        async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
            await super().areset(seed=seed)
            return [user("go")], {}

        async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
            self.steps += 1
            return [user("on")], 1e308, self.steps == 2, False, {}

        async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
            return 1e308, {}

    trajectory, limits = Trajectory(1, 0, 0, seed=5), Limits(turns=limit)
    await run_episode(trajectory, env=Generous(), chat=CHAT, engine=ScriptedEngine(talker), task={}, limits=limits)
    assert (trajectory.status, str(trajectory.stop_reason)[:8]) == (Status.FAILED, "Unscored")


async def test_every_record_of_an_unsafe_run_says_so(fast_path: Path) -> None:
    share(SandboxSettings("unsafe"))
    try:
        with Run(fast_path / "journal.sqlite", Guess, ONE, engine=ScriptedEngine(guesser)) as run:
            marked = await play_to_the_end(run)
    finally:
        share(SandboxSettings())
    with Run(fast_path / "safe" / "journal.sqlite", Guess, ONE, engine=ScriptedEngine(guesser)) as run:
        safe = await play_to_the_end(run)
    assert [trajectory.metrics.get("unsafe_sandbox") for trajectory in marked] == [1.0] * len(marked)
    assert marked
    assert all("unsafe_sandbox" not in trajectory.metrics for trajectory in safe)
