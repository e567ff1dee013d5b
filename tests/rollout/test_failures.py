"""The window of failures: what is no fault of the policy is counted over restarts, and the run stops for too much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_agent.config import Limits, RolloutConfig
from gspo_agent.env import Env, tool
from gspo_agent.errors import MOST_CHARACTERS, EngineError, EnvError, cause_of
from gspo_agent.messages import Message, user
from gspo_agent.rollout import collector as module
from gspo_agent.rollout.failures import WINDOW, Failures
from gspo_agent.testing import ScriptedEngine
from tests.rollout.scene import Run, Shop, guesser, play_to_the_end, until


def test_only_the_last_episodes_count_and_the_first_cause_among_them_is_told() -> None:
    failures = Failures(0.5)
    for _ in range(WINDOW // 2):
        assert failures.add("EngineError: gone") is None
    fault = failures.add("KeyError: other")
    assert isinstance(fault, EngineError)
    assert "101 of the last 101" in str(fault)
    assert "EngineError: gone" in str(fault)
    for _ in range(WINDOW):
        assert failures.add(None) is None
    assert failures.add("KeyError: other") is None
    assert failures.causes == {"EngineError: gone": 100, "KeyError: other": 2}


def test_what_earlier_lives_saw_counts_and_is_not_told_as_of_this_one() -> None:
    failures = Failures(0.5, ["KeyError: odd"] * (WINDOW // 2) + [None])
    assert not failures.causes
    assert isinstance(failures.add("ValueError: x"), EnvError)


class Dead(Shop):
    def setup(self, task: dict[str, Any]) -> None:
        raise KeyError("no such table")


async def test_failures_add_up_over_restarts_and_begin_anew_once_the_run_has_stopped_for_them(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixteen members each fails once a life, then waits: no life fails often enough by itself."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_BACK_OFF", 3600.0)
    path, config = fast_path / "journal.sqlite", RolloutConfig(group_size=8, groups_per_step=1, max_failed=0.2)
    for life in range(2):
        with Run(path, Dead, config) as run:
            assert len(run.ledger.recent_causes(WINDOW)) == 16 * life
            await run.collector.start(0)
            await until(lambda run=run, life=life: run.ledger.status().slots.get("failed") == 16 * (life + 1))
            await run.collector.stop()
    with Run(path, Dead, config) as run:
        await run.collector.start(0)
        with pytest.raises(EnvError, match=r"41 of the last 41 episodes failed.*no such table"):
            async with asyncio.timeout(20):
                await run.collector.lease(1, step=1)
        await run.collector.stop()
    with Run(path, Shop, config) as run:  # whoever starts it again has mended the environment
        assert run.ledger.recent_causes(WINDOW) == []
        assert await play_to_the_end(run)
        assert set(run.ledger.recent_causes(WINDOW)) == {None}


async def test_a_failed_member_waits_longer_each_time_and_a_stop_ends_the_waiting(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_BACK_OFF", 3600.0)
    config = RolloutConfig(group_size=2, groups_per_step=1, over_provision=1.0)
    with Run(fast_path / "journal.sqlite", Dead, config) as run:
        await run.collector.start(0)
        await until(lambda: run.ledger.status().slots.get("failed") == 2)
        await asyncio.sleep(0.01)
        assert run.ledger.status().slots == {"failed": 2, "waiting": 2}
        monkeypatch.setattr(module, "_CUT_SECONDS", 3600.0)  # who waits would be waited for
        async with asyncio.timeout(10):
            await run.collector.stop()
        assert not run.collector._tasks


class Odd(BaseException):
    pass


class Broken(Shop):
    """The first attempt at each member breaks, somewhere, in a way that is no `Exception`."""

    where: ClassVar[str]
    error: ClassVar[BaseException]

    def _break(self, where: str) -> None:
        if where == self.where and self.episode_id.endswith(".0"):
            raise self.error

    async def setup(self, task: dict[str, Any]) -> None:
        self._break("setup")
        super().setup(task)

    @tool
    async def add(self, number: int) -> str:
        """Adds a number to the running total."""
        self._break("add")
        self.total += number
        return str(self.total)

    async def score(self, task: dict[str, Any], answer: str) -> float:
        self._break("score")
        return 1.0

    async def close(self) -> None:
        self._break("close")


class Plain(Env):
    """As `Broken`, without a tool environment around it."""

    state_level = "replay"

    async def areset(self, **how: Any) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(**how)
        return [user("guess")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        if self.episode_id.endswith(".0"):
            raise asyncio.CancelledError("the connection was closed")
        return [], 1.0, True, False, {}


@pytest.mark.parametrize("where", ["setup", "add", "score", "close"])
@pytest.mark.parametrize("error", [asyncio.CancelledError("the connection was closed"), SystemExit(3), Odd("odd")])
async def test_whatever_an_environment_raises_costs_an_attempt_and_never_the_run(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    """A library whose connection closes cancels who waits for it; such an episode would never be heard of again."""
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 0.01)
    monkeypatch.setattr(Broken, "where", where, raising=False)
    monkeypatch.setattr(Broken, "error", error, raising=False)
    config = RolloutConfig(group_size=3, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)
    with Run(fast_path / "journal.sqlite", Broken, config) as run:
        async with asyncio.timeout(20):
            assert len(await play_to_the_end(run)) == 3
        causes = run.ledger.status().failures
    # What the model can act on is told to it, as of any other exception; the end of an episode hangs on no close.
    told = where == "close" or (where == "add" and not isinstance(error, asyncio.CancelledError))
    assert sum(causes.values()) == (0 if told else 3)
    assert all(f"{type(error).__name__}: {error}" in cause for cause in causes)


async def test_a_plain_environment_that_is_cancelled_from_within_is_tried_again(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACK_OFF", 0.01)
    config = RolloutConfig(group_size=3, groups_per_step=1, over_provision=1.0, filter_zero_variance=False)
    with Run(fast_path / "journal.sqlite", Plain, config) as run:
        async with asyncio.timeout(20):
            assert len(await play_to_the_end(run)) == 3
        assert run.ledger.status().failures == {"EnvError: Plain.step: CancelledError: the connection was closed": 3}


class Rude(Shop):
    async def setup(self, task: dict[str, Any]) -> None:
        task_of_the_episode = asyncio.current_task()
        assert task_of_the_episode is not None
        task_of_the_episode.cancel()
        await asyncio.sleep(0)


async def test_an_environment_that_cancels_the_runs_own_tasks_is_told_and_waited_for_in_vain_by_nobody(
    fast_path: Path,
) -> None:
    with Run(fast_path / "journal.sqlite", Rude) as run:
        await run.collector.start(0)
        with pytest.raises(EnvError, match=r"_play was cancelled, and not by its collector; see which tool"):
            async with asyncio.timeout(20):
                await run.collector.lease(1, step=1)
        await run.collector.stop()
        assert "failed" not in run.ledger.status().slots  # each goes on where it was, once that is mended


def test_a_cause_has_a_length_and_letters_that_everything_takes() -> None:
    assert cause_of(FileNotFoundError("\udcff.txt")) == "FileNotFoundError: ?.txt"
    long = cause_of(ValueError("x" * 10**6))
    assert len(long) == MOST_CHARACTERS
    assert long.startswith("ValueError: xxx")


class Unreadable(Shop):
    def setup(self, task: dict[str, Any]) -> None:
        raise FileNotFoundError("no file \udcff.txt")


async def test_a_cause_with_half_a_letter_is_the_one_that_is_told(fast_path: Path) -> None:
    with Run(fast_path / "journal.sqlite", Unreadable) as run:
        await run.collector.start(0)
        await until(lambda: run.ledger.status().failures)
        await run.collector.stop()
        assert list(run.ledger.status().failures) == ["EnvError: Unreadable.setup: FileNotFoundError: no file ?.txt"]


class Clumsy(Plain):
    """Each of these is a mistake that an author may make; `check` would name it, and so does the run."""

    state_level = "state"
    mistake: ClassVar[str]

    async def areset(self, **how: Any) -> tuple[list[Message], dict[str, Any]]:
        if self.mistake == "reset":
            raise KeyError("seed")
        return await super().areset(**how)

    async def astep(self, action: Message) -> Any:
        answers: dict[str, Any] = {
            "three": ([user("x")], 0.0, False),
            "text": ("x", 0.0, False, False, {}),
            "half a letter": ([user("\ud800")], 0.0, False, False, {}),
            "metric": ([user("x")], 0.0, False, False, {"metrics": {"length": "long"}}),
        }
        return answers.get(self.mistake, ([user("x")], 0.0, False, False, {}))

    async def afinish(self, stop_reason: str) -> Any:
        return "seven", {}

    def get_state(self) -> Any:
        if self.mistake == "state":
            raise OSError("gone")
        return 1

    def set_state(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("reset", "Clumsy.reset: KeyError: 'seed'"),
        ("state", "Clumsy.reset: OSError: gone"),
        ("three", "Clumsy.step: ValueError: not enough values to unpack"),
        ("text", "Clumsy.step: AttributeError: 'str' object"),
        ("half a letter", "Clumsy.step: UnicodeEncodeError: "),
        ("metric", "Clumsy.step: ValueError: could not convert string to float: 'long'"),
        ("verdict", "Clumsy.afinish: ValueError: could not convert string to float: 'seven'"),
    ],
)
async def test_a_cause_names_the_environment_and_what_of_it_broke(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, told: str
) -> None:
    monkeypatch.setattr(Clumsy, "mistake", mistake, raising=False)
    with Run(fast_path / "journal.sqlite", Clumsy, limits=Limits(turns=1), engine=ScriptedEngine(guesser)) as run:
        await run.collector.start(0)
        await until(lambda: run.ledger.status().failures)
        await run.collector.stop()
        (cause,) = run.ledger.status().failures
        assert cause.startswith(f"EnvError: {told}")
