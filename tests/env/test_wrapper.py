from __future__ import annotations

import asyncio
import threading
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text

from gspo_agent.config import EnvConfig
from gspo_agent.env import EnvFactory, TextEnv, ToolEnv, tool
from gspo_agent.errors import EnvError
from gspo_agent.messages import assistant, call, user


class Parrot(gymnasium.Env[str, str]):
    """A string-in, string-out environment that knows nothing of this framework."""

    observation_space = Text(200)
    action_space = Text(200)

    def __init__(self, word: str = "polly") -> None:
        self.word, self.threads = word, {threading.current_thread().name}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.threads.add(threading.current_thread().name)
        self.said: list[str] = []
        return f"{self.word} {int(self.np_random.integers(1000))} {(options or {}).get('mood', '')}", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.current_thread().name)
        if action == "raise":
            raise ValueError("squawk")
        self.said.append(action)
        done = action == "bye"
        info = {"length": len(action), "object": object(), "flag": True}
        return (7 if action == "number" else "" if done else action.upper()), float(len(self.said)), done, False, info


class Counter(ToolEnv):
    def setup(self, task: dict[str, Any]) -> None:
        self.count = 0

    def prompt(self, task: dict[str, Any]) -> str:
        return f"count {task.get('to')}"

    @tool
    def up(self) -> int:
        """Count up."""
        self.count += 1
        return self.count

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"right": float(self.count)}


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return 2 * float(reward)


def wrapped_counter() -> gymnasium.Env[Any, Any]:
    return Doubled(Counter())


async def test_strings_become_messages_and_messages_strings() -> None:
    env = EnvFactory(EnvConfig(id=f"{__name__}:Parrot", options={"word": "ara"})).create()
    observation, info = await env.areset(seed=3, options={"task": {"mood": "glad"}})
    assert observation[0]["content"].startswith("ara ")
    assert observation[0]["content"].endswith(" glad")
    assert info == {}
    assert await env.astep(assistant("hello")) == (
        [user("HELLO")], 1.0, False, False, {"metrics": {"length": 5.0, "flag": 1.0}},
    )  # fmt: skip
    result = await env.astep(assistant("bye"))
    assert result[:4] == ([], 2.0, True, False)
    assert env.state_level == "replay"
    await env.aclose()
    await env.aclose()


async def test_the_whole_life_is_in_one_thread_of_its_own() -> None:
    env = EnvFactory(EnvConfig(id=f"{__name__}:Parrot")).create()
    assert isinstance(env, TextEnv)
    await env.areset(seed=0)
    await env.astep(assistant("x"))
    inner: Any = env.outer
    assert inner.threads == {"gspo_agent hook"}
    await env.aclose()


async def test_a_task_with_a_seed_begins_alike_for_a_whole_group() -> None:
    factory = EnvFactory(EnvConfig(id=f"{__name__}:Parrot"))
    begun = [(await factory.create().areset(seed=seed, options={"task": {"seed": 5}}))[0] for seed in (1, 2)]
    assert begun[0] == begun[1]
    other = (await factory.create().areset(seed=1, options={"task": {"seed": 6}}))[0]
    assert other != begun[0]
    seeded = [(await factory.create().areset(seed=seed))[0] for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


async def test_replaying_the_actions_repeats_every_observation() -> None:
    factory = EnvFactory(EnvConfig(id=f"{__name__}:Parrot"))
    runs = []
    for _ in range(2):
        env = factory.create()
        seen = [(await env.areset(seed=9))[0]]
        seen += [(await env.astep(assistant(text)))[0] for text in ("a", "b")]
        runs.append(seen)
    assert runs[0] == runs[1]


async def test_faults_name_the_environment() -> None:
    env = EnvFactory(EnvConfig(id=f"{__name__}:Parrot")).create()
    with pytest.raises(EnvError, match="step before reset"):
        await env.astep(assistant("x"))
    await env.areset(seed=0)
    with pytest.raises(EnvError, match=r"Parrot\.step: ValueError: squawk"):
        await env.astep(assistant("raise"))
    with pytest.raises(EnvError, match="the observation 7 is no text"):
        await env.astep(assistant("number"))


def test_it_is_a_gymnasium_environment_itself() -> None:
    env = EnvFactory(EnvConfig(id=f"{__name__}:Parrot")).create()
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    assert env.step(assistant("bye"))[2] is True
    env.close()


async def test_registered_ids_keep_the_wrappers_of_make() -> None:
    gymnasium.register("gspo_test/Parrot-v0", entry_point=f"{__name__}:Parrot", max_episode_steps=2)
    try:
        env = EnvFactory(EnvConfig(id="gspo_test/Parrot-v0", options={"word": "kea"})).create()
        assert (await env.areset(seed=0))[0][0]["content"].startswith("kea")
        assert (await env.astep(assistant("x")))[3] is False
        assert (await env.astep(assistant("x")))[3] is True
        await env.aclose()
    finally:
        del gymnasium.registry["gspo_test/Parrot-v0"]


async def test_one_of_ours_inside_a_wrapper_is_driven_from_outside_with_messages() -> None:
    env = EnvFactory(EnvConfig(id=f"{__name__}:wrapped_counter", rewards={"right": 5.0})).create()
    env.episode_id = "3.0.0"
    observation, _ = await asyncio.wait_for(env.areset(seed=0, options={"task": {"to": 2}}), 20)
    assert observation == [user("count 2")]
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["up"]
    result = await asyncio.wait_for(env.astep(assistant("", [call("up")])), 20)
    assert (result[0][0]["content"], result[0][0]["tool_call_id"]) == ("1", "3.0.0/0/0")
    result = await asyncio.wait_for(env.astep(assistant("done")), 20)
    assert result[1:] == (10.0, True, False, {"components": {"right": 1.0}})
    await env.aclose()


async def test_a_limit_scores_one_of_ours_inside_a_wrapper() -> None:
    env = EnvFactory(EnvConfig(id=f"{__name__}:wrapped_counter")).create()
    await env.areset(seed=0, options={"task": {"to": 2}})
    await env.astep(assistant("", [call("up")]))
    assert await asyncio.wait_for(env.afinish("turns"), 20) == (1.0, {"components": {"right": 1.0}})
    await env.aclose()
