"""Quotas and deadlines of an episode: who waits, what the waiting counts for, and what a cut leaves of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.config import EnvConfig, Limits, QuotaConfig, RolloutConfig
from gspo_agent.env import Env, EnvFactory, ToolEnv, tool
from gspo_agent.env import call_id as this_call
from gspo_agent.errors import ConfigError
from gspo_agent.messages import Message, call, user
from gspo_agent.quota import Quota
from gspo_agent.rollout import collector
from gspo_agent.rollout.episode import run_episode
from gspo_agent.rollout.recorder import Recorder
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import Status, Trajectory
from gspo_agent.waiting import aside
from tests.rollout.scene import CHAT, Run, play_to_the_end, until

ONE = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)
ONCE = QuotaConfig(rate=1, period=3600)


class Search(ToolEnv):
    """Two calls in one message, then an answer."""

    ran: ClassVar[list[str]]
    inside: ClassVar[list[int]]
    go: ClassVar[asyncio.Event]

    def setup(self, task: dict[str, Any]) -> None:
        self.found = 0

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool(timeout=20)
    async def search(self, query: str) -> str:
        """Search."""
        Search.ran.append(this_call().partition("/")[2])
        Search.inside[0] += 1
        Search.inside[1] = max(Search.inside)
        await Search.go.wait()
        Search.inside[0] -= 1
        self.found += 1
        return "found"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(self.found)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Search.ran, Search.inside, Search.go = [], [0, 0], asyncio.Event()


def searcher(prompt: Sequence[int], seed: int) -> list[int]:
    if sum(token == ByteChat.ASSISTANT for token in prompt) == 1:
        return CHAT.turn("", call("search", query="a"), call("search", query="b"))
    return CHAT.turn("done")


def a_run(path: Path, env: type[Env] = Search, limits: Limits | None = None, **quotas: QuotaConfig) -> Run:
    run = Run(path / "journal.sqlite", env, ONE, limits or Limits(), ScriptedEngine(searcher))
    run.quotas = quotas
    return run


def parallel(env: type[ToolEnv]) -> type[ToolEnv]:
    search = tool(timeout=20, parallel=True)(env.search.function)  # type: ignore[attr-defined]
    return type("Parallel", (env,), {"search": search})


async def test_a_quota_holds_over_all_instances_of_an_environment(fast_path: Path) -> None:
    with a_run(fast_path, parallel(Search), search=QuotaConfig(concurrency=3)) as run:
        await run.collector.start(0)
        await until(lambda: len(Search.ran) == 3)
        Search.go.set()
        lease = await run.collector.lease(1, step=1)
        await run.collector.stop()
    assert [t.reward for t in lease.groups[0].trajectories] == [2.0, 2.0]
    assert Search.inside == [0, 3]


async def test_a_cut_leaves_the_queue_and_what_only_waited_was_not_begun(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_CUT_SECONDS", 3600.0)  # for what is inside something; these are not
    with a_run(fast_path, search=ONCE) as run:
        Search.go.set()
        await run.collector.start(0)
        active = run.collector._attempts.active
        await until(lambda: [recorder.stage for recorder in active.values()] == ["quota", "quota"])
        await run.collector.stop()
        assert run.quota("search").waiting == 0
        assert len(Search.ran) == 1
    with a_run(fast_path) as run:
        trajectories = await play_to_the_end(run)
    assert sorted(Search.ran) == [f"1.{n}.0/0/{position}" for n in (0, 1) for position in (0, 1)]
    outcomes = [m["outcome"] for t in trajectories for m in t.messages if m["role"] == "tool"]
    assert outcomes == ["ok"] * 4


async def test_a_turn_that_comes_in_the_grace_of_a_stop_begins_nothing(fast_path: Path) -> None:
    with a_run(fast_path, parallel(Search), search=QuotaConfig(concurrency=1)) as run:
        await run.collector.start(0)
        await until(lambda: len(Search.ran) == 1 and run.quota("search").waiting == 3)
        stopping = asyncio.create_task(run.collector.stop(grace=3600.0))
        await asyncio.sleep(0)
        Search.go.set()
        await stopping
        assert len(Search.ran) == 1


async def played(env: ToolEnv | Env, limits: Limits, engine: ScriptedEngine | None = None) -> tuple[Trajectory, Any]:
    recorder = Recorder(Trajectory(1, 0, 0, seed=0))
    trajectory = await run_episode(
        recorder.episode.trajectory, env=env, chat=CHAT, engine=engine or ScriptedEngine(searcher), task={},
        limits=limits, recorder=recorder,
    )  # fmt: skip
    return trajectory, recorder.episode


@pytest.mark.parametrize("kind", [Search, parallel(Search)])
async def test_waiting_for_a_quota_is_neither_the_tools_time_nor_the_episodes(kind: Any) -> None:
    """Both deadlines are shorter than the wait."""
    kind = type("Hurried", (kind,), {"search": tool(timeout=0.05, parallel=kind is not Search)(kind.search.function)})
    factory = EnvFactory(EnvConfig(id="search", quotas={"search": QuotaConfig(concurrency=1)}), kind)
    quota = factory._quotas["search"]
    Search.go.set()
    async with quota:
        playing = asyncio.ensure_future(played(factory.create(), Limits(wall=0.2)))
        await until(lambda: quota.waiting == (1 if kind.search.parallel is False else 2))
        await asyncio.sleep(0.3)
    trajectory, episode = await playing
    assert (trajectory.status, trajectory.reward) == (Status.TERMINATED, 2.0)
    assert episode.seconds < 0.2


async def test_a_call_that_hangs_beside_one_that_waits_for_it_does_not_stop_the_episodes_clock() -> None:
    kind = type("Hanging", (parallel(Search),), {"search": tool(parallel=True)(Search.search.function)})
    factory = EnvFactory(EnvConfig(id="search", quotas={"search": QuotaConfig(concurrency=1)}), kind)
    trajectory, _ = await played(factory.create(), Limits(wall=0.1))
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, "wall")
    assert len(Search.ran) == 1


async def test_a_slow_judge_is_not_the_episodes_time_but_has_a_deadline_of_its_own() -> None:
    Search.go.set()

    class Judged(Search):
        seconds = 0.3

        async def score(self, task: dict[str, Any], answer: str) -> float:
            await asyncio.sleep(self.seconds)
            return 1.0

    trajectory, episode = await played(Judged(), Limits(wall=0.2))
    assert (trajectory.status, trajectory.reward, episode.seconds < 0.2) == (Status.TERMINATED, 1.0, True)
    Judged.seconds = 3600
    trajectory, _ = await played(Judged(), Limits(score=0.02))
    assert trajectory.status is Status.FAILED
    assert trajectory.stop_reason == "Unscored: Judged.score gave no verdict within limits.score, 0.02 s"
    assert trajectory.rewards == []


@pytest.mark.parametrize("end", ["answer", "limit"])
async def test_a_judge_that_hangs_in_its_thread_is_left_there(end: str) -> None:
    """In the last step and where a limit ended the episode alike; the instance is not used again."""
    go, closed = threading.Event(), threading.Event()
    Search.go.set()

    class Hanging(Search):
        def score(self, task: dict[str, Any], answer: str) -> float:
            go.wait()
            return 1.0

        def close(self) -> None:
            closed.set()

    env = Hanging()
    trajectory, _ = await played(env, Limits(score=0.02, turns=16 if end == "answer" else 1))
    assert trajectory.status is Status.FAILED
    assert "gave no verdict within limits.score" in str(trajectory.stop_reason)
    assert env.tainted
    await env.aclose()
    assert not closed.is_set()  # it waits for the thread, and nobody waits for it
    go.set()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_a_judges_wait_for_its_turn_at_something_shared_is_not_its_time() -> None:
    Search.go.set()

    class Waiting(Search):
        async def score(self, task: dict[str, Any], answer: str) -> float:
            with aside("tools"):
                await asyncio.sleep(0.2)
            return 1.0

    trajectory, episode = await played(Waiting(), Limits(score=0.1, wall=0.1))
    assert (trajectory.status, trajectory.reward, episode.seconds < 0.1) == (Status.TERMINATED, 1.0, True)


async def test_an_own_afinish_has_the_same_deadline() -> None:
    class Plain(Env):
        async def areset(self, **_: Any) -> tuple[list[Message], dict[str, Any]]:
            return [user("?")], {}

        async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
            await asyncio.sleep(3600)
            return 1.0, {}

    trajectory, _ = await played(Plain(), Limits(score=0.02, turn_tokens=1))
    assert trajectory.stop_reason == "Unscored: Plain.afinish gave no verdict within limits.score, 0.02 s"


async def test_a_judge_past_its_deadline_fails_the_attempt_and_the_next_one_is_scored(fast_path: Path) -> None:
    Search.go.set()

    class Once(Search):
        async def score(self, task: dict[str, Any], answer: str) -> float:
            await asyncio.sleep(3600 if self.episode_id == "1.0.0" else 0)
            return 1.0

    with a_run(fast_path, Once, Limits(score=0.05)) as run:
        trajectories = await play_to_the_end(run)
        assert run.ledger.status().failures == {"Unscored: Once.score gave no verdict within limits.score, 0.05 s": 1}
    assert [(t.id, t.reward) for t in trajectories] == [("1.0.1", 1.0), ("1.1.0", 1.0)]


async def test_a_cut_while_it_is_scored_goes_on_by_scoring_again(fast_path: Path) -> None:
    Search.go.set()

    class Judged(Search):
        judged: ClassVar[list[str]] = []

        async def score(self, task: dict[str, Any], answer: str) -> float:
            self.judged.append(self.episode_id)
            await asyncio.sleep(3600 if len(self.judged) <= 2 else 0)
            return float(self.found)

    with a_run(fast_path, Judged) as run:
        await run.collector.start(0)
        active = run.collector._attempts.active
        await until(lambda: [recorder.stage for recorder in active.values()] == ["judges", "judges"])
        await run.collector.stop()
    with a_run(fast_path, Judged) as run:
        trajectories = await play_to_the_end(run)
    assert [t.reward for t in trajectories] == [2.0, 2.0]
    assert sorted(Judged.judged) == ["1.0.0", "1.0.0", "1.1.0", "1.1.0"]
    assert len(Search.ran) == 4


async def test_the_judge_and_a_plain_step_have_quotas_too(fast_path: Path) -> None:
    Search.go.set()
    with a_run(fast_path, score=ONCE) as run:
        await run.collector.start(0)
        await until(lambda: run.quota("score").waiting == 1)
        await run.collector.stop()

    class Plain(Env):
        async def areset(self, **_: Any) -> tuple[list[Message], dict[str, Any]]:
            return [user("?")], {}

        async def astep(self, action: Message) -> Any:
            return [], 1.0, True, False, {}

    (fast_path / "plain").mkdir()
    with a_run(fast_path / "plain", Plain, step=ONCE) as run:
        await run.collector.start(0)
        await until(lambda: run.quota("step").waiting == 1)
        await run.collector.stop()


async def test_requests_have_the_engines_quota_and_leave_its_queue_when_they_are_cut(fast_path: Path) -> None:
    quota = Quota(concurrency=1)
    with a_run(fast_path) as run:
        run.engine.turn = quota
        run.engine.hold_at = 0
        await run.collector.start(0)
        await until(lambda: len(run.engine.held) == quota.waiting == 1)
        stages = sorted(recorder.stage for recorder in run.collector._attempts.active.values())
        assert stages == ["quota", "tokens"]
        await run.collector.stop()
        assert (quota.waiting, quota._inside) == (0, 0)
    Search.go.set()
    engine = ScriptedEngine(searcher, quota=quota)
    async with quota:
        playing = asyncio.ensure_future(played(Search(), Limits(wall=0.2), engine))
        await until(lambda: quota.waiting == 1)
        await asyncio.sleep(0.3)
    trajectory, episode = await playing
    assert (trajectory.status, episode.seconds < 0.2) == (Status.TERMINATED, True)


def test_a_quota_for_nothing_is_refused_when_the_environment_is_loaded() -> None:
    section = EnvConfig(id="search", quotas={"serach": ONCE})
    with pytest.raises(ConfigError, match="env search: quotas: nothing here is called 'serach'; did you mean 'search'"):
        EnvFactory(section, Search)
    with pytest.raises(ConfigError, match="'step'; known here: score, search"):
        EnvFactory(EnvConfig(id="search", quotas={"step": ONCE}), Search)


async def test_a_quota_for_nothing_stops_the_run_once_a_task_has_told_its_tools(fast_path: Path) -> None:
    def look(query: str) -> str:
        """Look."""
        return query

    class Late(Search):
        def tools(self) -> Any:
            return [look]

    factory = EnvFactory(EnvConfig(id="late", quotas={"look": ONCE, "search": ONCE}), Late)
    await factory.create().areset(options={"task": {}})
    with a_run(fast_path, Late, lok=ONCE) as run:
        with pytest.raises(ConfigError, match="Late: quotas: nothing here is called 'lok'; did you mean 'look'"):
            await play_to_the_end(run)
        assert run.ledger.status().failures == {}
