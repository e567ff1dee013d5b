"""A state that is taken for the last one is the last one."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.env import ToolEnv, tool
from gspo_agent.env.contract import StepResult
from gspo_agent.messages import Message, assistant, call, user


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


async def test_a_state_that_an_author_adds_to_is_made_anew_every_time() -> None:
    class Noting:
        def get_state(self) -> Any:
            state = super().get_state()  # type: ignore[misc]
            state["attributes"].setdefault("notes", []).append("seen")
            return state

    class Both(Noting, Box):
        pass

    class Asynchronous(Box):
        async def aget_state(self) -> Any:
            return self.get_state() | {"more": 1}

    env = Both()
    await env.areset(seed=3, options={"task": {}})
    states = [env.get_state() for _ in range(3)]
    assert states[0] is not states[1]
    assert [state["attributes"]["notes"] for state in states] == [["seen"]] * 3
    assert [kind.seals_state for kind in (Box, Both, Asynchronous)] == [True, False, False]


@pytest.mark.parametrize("slots", [("total",), "total"])
def test_attributes_that_no_state_would_hold_are_refused(slots: Any) -> None:
    with pytest.raises(TypeError, match="__slots__"):
        type("Slotted", (Box,), {"__slots__": slots})
    type("Empty", (Box,), {"__slots__": ()})


async def test_a_step_that_an_author_answers_himself_changes_no_call_id_of_a_later_life() -> None:
    """A call that was begun there would be taken for another one, and run again."""

    class Strict(Box):
        logs_calls = True

        async def astep(self, action: Message) -> StepResult:
            return await super().astep(action) if action.get("tool_calls") else ([user("call!")], 0.0, False, False, {})

    env, later = Strict(), Strict()
    env.known_turn, env.episode_id = 0, "e"
    await env.areset(seed=3, options={"task": {}})
    await env.astep(assistant("what?"))
    state = env.get_state()
    later.known_turn, later.episode_id = 1, "e"
    later.set_state(state)
    ids = [(await each.astep(assistant("", [call("nothing")])))[0][0]["tool_call_id"] for each in (env, later)]
    assert ids == ["e/0/0", "e/0/0"]
