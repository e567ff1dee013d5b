"""A state that is taken for the last one is the last one."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.env import ToolEnv, tool
from gspo_agent.messages import assistant, call


class Box(ToolEnv):
    """Whatever is put into it."""

    def setup(self, task: dict[str, Any]) -> None:
        self.word, self.things = "a", []

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    async def nothing(self) -> str:
        """Does nothing."""
        return ""

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 0.0


CHANGES = {
    "nothing": lambda env: None,
    "a number": lambda env: setattr(env, "word", 1),
    "true": lambda env: setattr(env, "word", True),
    "one": lambda env: setattr(env, "word", 1.0),
    "a word": lambda env: setattr(env, "word", "b"),
    "into a list": lambda env: env.things.append(1) if type(env.things) is list else None,
    "out of a list": lambda env: env.things.clear(),
    "a dict for a list": lambda env: setattr(env, "things", {}),
    "a list": lambda env: setattr(env, "things", []),
    "the same list twice": lambda env: setattr(env, "word", env.things),
    "a new attribute": lambda env: setattr(env, "extra", None),
    "none of it": lambda env: vars(env).pop("extra", None),
    "a metric": lambda env: env.metrics.update(seen=1.0),
    "no metrics": lambda env: env.metrics.clear(),
    "a draw": lambda env: env.np_random.random(),
    "a step": lambda env: asyncio.run(env.astep(assistant("", [call("nothing")]))),
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=8), st.booleans())
def test_a_state_is_what_encoding_everything_again_gives(changes: list[str], known: bool) -> None:
    env = Box()
    env.known_turn = 0 if known else None
    asyncio.run(env.areset(seed=3, options={"task": {"n": 1}}))
    for change in changes:
        CHANGES[change](env)
        quick = orjson.dumps(env.get_state())
        env._ToolEnv__episode.last = None  # type: ignore[attr-defined]
        assert quick == orjson.dumps(env.get_state())


async def test_while_nothing_changes_the_state_is_the_same_object() -> None:
    env = Box()
    env.known_turn = 0
    await env.areset(seed=3, options={"task": {"n": 1}})
    state = env.get_state()
    await env.astep(assistant("", [call("nothing")]))
    assert env.get_state() is state
    env.np_random.random()
    assert env.get_state() is not state


async def test_the_turn_that_the_runner_knows_is_not_in_the_state_and_comes_back_from_it() -> None:
    env, fresh = Box(), Box()
    env.known_turn = 0
    await env.areset(seed=3, options={"task": {"n": 1}})
    await env.astep(assistant("", [call("nothing")]))
    state = env.get_state()
    assert "turn" not in state
    fresh.known_turn, fresh.episode_id = 1, "e"
    fresh.set_state(state)
    messages, *_ = await fresh.astep(assistant("", [call("nothing")]))
    assert messages[0]["tool_call_id"].endswith("/1/0")
