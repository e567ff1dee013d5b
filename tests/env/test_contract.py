from __future__ import annotations

import asyncio
import threading
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium

from gspo_agent.env import CallLog, Env, ToolEnv
from gspo_agent.env.spaces import AssistantMessage, MessageList
from gspo_agent.errors import EnvError, StateLost
from gspo_agent.messages import Message, assistant, user


class SyncEcho(Env):
    def __init__(self) -> None:  # without super().__init__(), as people write it
        self.threads: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(10))
        return [user(f"guess {self.secret}")], {}

    def step(self, action: Message) -> Any:
        self.threads.append(threading.current_thread().name)
        return [], float(action["content"] == str(self.secret)), True, False, {"metrics": {"length": 1.0}}


class AsyncEcho(Env):
    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().areset(seed=seed)
        await asyncio.sleep(0)
        self.secret = int(self.np_random.integers(10))
        return [user(f"guess {self.secret}")], {}

    async def astep(self, action: Message) -> Any:
        await asyncio.sleep(0)
        return [], float(action["content"] == str(self.secret)), True, False, {}


class ToolEcho(ToolEnv):
    async def prompt(self, task: dict[str, Any]) -> str:
        return "say hi"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(answer == "hi")


class Mixin:
    def step(self, action: Message) -> Any:
        return [user("from the mixin")], 0.0, False, False, {}


class MixedIn(Mixin, AsyncEcho):
    pass


class SuperStep(SyncEcho):
    def step(self, action: Message) -> Any:
        observation, reward, *rest = super().step(action)
        return (observation, reward + 10, *rest)


class SuperAstep(AsyncEcho):
    async def astep(self, action: Message) -> Any:
        observation, reward, *rest = await super().astep(action)
        return (observation, reward + 10, *rest)


class SyncOverTool(ToolEcho):
    def step(self, action: Message) -> Any:
        observation, reward, *rest = super().step(action)
        return (observation, reward + 10, *rest)


@pytest.mark.parametrize("kind", [SyncEcho, AsyncEcho, ToolEcho])
@pytest.mark.filterwarnings("error")
def test_gymnasium_makes_and_checks_it_without_a_warning(kind: type[Env]) -> None:
    gymnasium.register("gspo_test/Kind-v0", entry_point=kind)
    try:
        env = gymnasium.make("gspo_test/Kind-v0")
        observation, _ = env.reset(seed=3, options={"task": {}})
        assert observation in env.observation_space
        observation, reward, terminated, truncated, _ = env.step(assistant("no"))
        assert (reward, terminated, truncated) == (0.0, True, False)
        check_gymnasium(env.unwrapped)
        env.close()
    finally:
        del gymnasium.registry["gspo_test/Kind-v0"]


def test_spaces_have_no_shape_and_hold_messages_only() -> None:
    env = SyncEcho()
    assert env.observation_space.shape is None
    assert env.action_space.shape is None
    assert env.action_space.sample() in env.action_space
    assert env.observation_space.sample() in env.observation_space
    assert [user("x")] not in env.action_space
    assert user("x") not in env.action_space
    assert assistant("x") not in env.observation_space
    assert [{"role": "robot", "content": "x"}] not in env.observation_space
    assert AssistantMessage() == AssistantMessage() != MessageList()
    env.action_space.seed(5)
    first = env.action_space.sample()
    env.action_space.seed(5)
    assert env.action_space.sample() == first


@pytest.mark.parametrize("kind", [SyncEcho, AsyncEcho])
async def test_the_other_pair_is_filled_in(kind: type[Env]) -> None:
    env = kind()
    observation, _ = await env.areset(seed=1)
    right = observation[0]["content"].split()[-1]
    assert (await env.astep(assistant(right)))[1] == 1.0
    sync = kind()
    assert sync.reset(seed=1)[0] == observation
    assert sync.step(assistant(right))[1] == 1.0
    await env.aclose()
    sync.close()


async def test_a_synchronous_step_runs_in_a_thread_of_the_framework() -> None:
    env = SyncEcho()
    await env.areset(seed=1)
    await env.astep(assistant(""))
    assert env.threads == ["gspo_agent hook"]


@pytest.mark.parametrize(("kind", "reward"), [(SuperStep, 11.0), (SuperAstep, 11.0), (SyncOverTool, 11.0)])
async def test_super_reaches_the_class_above_and_never_comes_back(kind: type[Env], reward: float) -> None:
    env = kind()
    observation, _ = await env.areset(seed=1)
    action = assistant("hi" if isinstance(env, ToolEnv) else observation[0]["content"].split()[-1])
    assert (await asyncio.wait_for(env.astep(action), 20))[1] == reward
    again = kind()
    again.reset(seed=1)
    assert again.step(action)[1] == reward


async def test_a_half_from_a_mixin_counts_as_the_authors() -> None:
    env = MixedIn()
    await env.areset(seed=1)
    assert (await env.astep(assistant("")))[0] == [user("from the mixin")]


def test_an_asynchronous_method_under_a_synchronous_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.step is asynchronous; name it astep"):

        class Wrong(Env):
            async def step(self, action: Message) -> Any: ...


async def test_what_a_synchronous_author_raises_names_the_place() -> None:
    class Broken(SyncEcho):
        def step(self, action: Message) -> Any:
            raise KeyError("gold")

    env = Broken()
    await env.areset(seed=0)
    with pytest.raises(EnvError, match=r"Broken\.step: KeyError: 'gold'"):
        await env.astep(assistant(""))


async def test_cancelling_a_synchronous_step_taints_the_instance() -> None:
    go = threading.Event()

    class Slow(SyncEcho):
        def step(self, action: Message) -> Any:
            go.wait(20)

    env = Slow()
    await env.areset(seed=0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.astep(assistant("")), 0.01)
    assert env.tainted
    go.set()


def test_levels_and_logging_follow_from_what_is_overridden() -> None:
    class Stateful(SyncEcho):
        def get_state(self) -> Any:
            return {}

        def set_state(self, state: Any) -> None: ...

    class OwnStep(ToolEcho):
        async def astep(self, action: Message) -> Any:
            return await super().astep(action)

    assert (Env.state_level, SyncEcho.state_level, Stateful.state_level) == ("none", "none", "state")
    assert (ToolEcho.state_level, ToolEcho.logs_calls) == ("state", True)
    assert (SyncEcho.logs_calls, OwnStep.logs_calls) == (False, False)
    with pytest.raises(StateLost, match="SyncEcho keeps no state"):
        SyncEcho().set_state({})
    assert SyncEcho().get_state() is None


async def test_the_default_log_only_runs_and_the_default_finish_gives_nothing() -> None:
    async def function() -> int:
        return 3

    from gspo_agent.env import CallMeta

    assert await CallLog().run("a/0/0", function, CallMeta("x", {})) == 3
    assert await SyncEcho().afinish("turns") == (0.0, {})


def test_a_task_is_drawn_with_the_seed_from_lists_and_streams() -> None:
    class Listed(SyncEcho):
        @classmethod
        def tasks(cls, split: str, **options: Any) -> Any:
            return [{"n": n} for n in range(50)]

    class Streamed(SyncEcho):
        @classmethod
        def tasks(cls, split: str, **options: Any) -> Any:
            n = 0
            while True:
                yield {"n": n}
                n += 1

    for kind in (Listed, Streamed):
        drawn = []
        for seed in (1, 1, 2, 3):
            env = kind()
            env.reset(seed=seed)
            drawn.append(env.sample_task()["n"])
        assert drawn[0] == drawn[1]
        assert len(set(drawn)) > 1
    assert SyncEcho().sample_task() == {}


def test_a_secret_is_not_shown_by_the_meta_record() -> None:
    from gspo_agent.env import CallMeta

    assert "hunter2" not in repr(CallMeta("login", {"password": "[redacted]"}, secrets=("hunter2",)))
