"""check_env: tries an environment against every promise of the contract and names each one that is broken."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env as check_gymnasium

from gspo_agent.env.check_chat import ChatLike, chat_breaches
from gspo_agent.env.check_class import CLASS_CHECKS
from gspo_agent.env.contract import Env
from gspo_agent.env.loading import EnvFactory, load_env
from gspo_agent.env.plain_json import no_json
from gspo_agent.env.spaces import is_message
from gspo_agent.env.threads import run_sync
from gspo_agent.env.tool_env import ToolEnv
from gspo_agent.env.wrapper import TextEnv
from gspo_agent.errors import GspoAgentError
from gspo_agent.messages import Message, ToolCall, assistant

_SEED = 7
_TEXT = "I do not know."
_any_number = functools.partial(json.dumps, allow_nan=False)  # the runner makes floats of numpy's


def check_env(env: Any, chat: ChatLike | None = None) -> list[str]:
    """Every breach of the contract, one line each, "place: what is wrong and what to do"; [] when clean.

    Args:
        env: An id, a class, an EnvFactory, an instance (of which fresh ones are made), or a function that makes one.
        chat: With it the conversation is rendered, parsed and extended as an episode would do.
    """
    check = _Check(_maker(env))
    run_sync(check.everything(chat))
    if not check.breaches:
        check.gymnasium()
    return check.breaches


def _maker(env: Any) -> Callable[[], Any]:
    if isinstance(env, str):
        env = load_env(env)
    if isinstance(env, EnvFactory):
        return env.create
    if isinstance(env, gymnasium.Wrapper) and env.spec is not None:
        return functools.partial(_ours, env.spec.make)
    if isinstance(env, gymnasium.Env):
        kind, kwargs = type(env), env.spec.kwargs if env.spec is not None else {}
        return functools.partial(_ours, functools.partial(kind, **kwargs))
    return functools.partial(_ours, env)


def _ours(make: Callable[[], Any]) -> Any:
    """What `make` makes; a plain Gymnasium environment in its TextEnv, as a run would have it."""
    env = make()
    foreign = isinstance(env, gymnasium.Env) and not isinstance(env, Env)
    return TextEnv(lambda: env, type(env.unwrapped).__name__) if foreign else env


class _Check:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.breaches: list[str] = []

    def breach(self, place: str, what: str) -> None:
        line = f"{place}: {what}"
        if line not in self.breaches:
            self.breaches.append(line)

    @contextmanager
    def expecting(self, place: str) -> Iterator[None]:
        """An exception inside is a breach at `place`."""
        try:
            yield
        except Exception as error:
            named = isinstance(error, GspoAgentError)  # these say themselves which hook broke
            self.breach(place, str(error) if named else f"raised {type(error).__name__}: {error}")

    async def everything(self, chat: ChatLike | None) -> None:
        env: Any = None
        with self.expecting("constructor"):
            env = self.make()
        if env is None:
            return
        if not isinstance(env, Env):
            self.breach("constructor", f"made a {type(env).__name__}, which is no gymnasium.Env")
            return
        for place, look in CLASS_CHECKS.items():
            with self.expecting(place):
                for breach in look(type(env)):
                    self.breach(*breach)
        if await self.resets(env):
            await self.ends()
            await self.calls()
            await self.limit()
            if chat is not None:
                await self.conversation(chat)
        await self.closes(env)

    async def fresh(self) -> Env:
        env: Env = self.make()
        await env.areset(seed=_SEED, options={})
        return env

    async def resets(self, env: Env) -> bool:
        """Whether there is an episode to go on with."""
        observation: Any = None
        with self.expecting("reset"):
            observation, info = await env.areset(seed=_SEED, options={})
        if observation is None:
            kind = type(env)
            if kind.sample_task is Env.sample_task and kind.tasks("train") is None:
                self.breach(
                    "reset", "has no task of its own to begin with; write sample_task(self) or tasks(cls, split)"
                )
            return False
        sound = self.observation("reset", observation, empty=False)
        self.info("reset", info)
        if env._np_random is None:
            self.breach("reset", "does not seed np_random; call super().reset(seed=seed)")
        with self.expecting("reset"):
            twin = self.make()
            again, info_again = await twin.areset(seed=_SEED, options={})
            if again != observation or twin.tool_schemas != env.tool_schemas:
                self.breach("reset", "two instances with the same seed begin differently; draw from self.np_random")
            elif info_again != info:
                self.breach("reset", f"info differs between two resets with the same seed: {info!r}, {info_again!r}")
            await self.end(twin)
        if problem := no_json(env.tool_schemas, "tool_schemas"):
            self.breach("tools", f"the schemas are not JSON: {problem}")
        return sound

    async def ends(self) -> None:
        """A plain answer, twice from the same start."""
        with self.expecting("step"):
            first, second = await self.fresh(), await self.fresh()
            result: Any = await first.astep(assistant(_TEXT))
            if not isinstance(result, tuple) or len(result) != 5:
                self.breach("step", f"returned {result!r:.80}, not observation, reward, terminated, truncated, info")
                return
            self.step_result(result)
            repeated: Any = await second.astep(assistant(_TEXT))
            if repeated != result:
                self.breach("step", "the same action from the same start is answered differently; draw from np_random")
            if isinstance(second, ToolEnv) and type(second).astep is ToolEnv.astep:
                await self.repeats(second)
            await self.end(first)
            await self.end(second)

    async def repeats(self, env: ToolEnv) -> None:
        if await env._score(_TEXT) != await env._score(_TEXT):
            self.breach("score", "two calls with the same task and answer differ; after a crash it may run again")

    def step_result(self, result: tuple[Any, ...]) -> None:
        observation, reward, terminated, truncated, info = result
        self.observation("step", observation, empty=bool(terminated or truncated))
        number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if not number or not math.isfinite(reward):
            self.breach("step", f"the reward is {reward!r}, not a finite number")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool):
                self.breach("step", f"{name} is {flag!r}, not a bool")
        if truncated is True:
            self.breach("step", "truncates at the first step; turn limits belong to the runner")
        self.info("step", info)

    async def calls(self) -> None:
        """Calls that are wrong, then one of every tool, each against a twin that is rebuilt from the state."""
        with self.expecting("step"):
            env = await self.fresh()
            if not isinstance(env, ToolEnv) or not env.tool_schemas:
                await self.state(env)
                await self.later_state(env)
                await self.end(env)
                return
            wrong: Message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [_call("no_such_tool", {}), {"error": "no JSON"}],
            }
            observation, _, terminated, truncated, _ = await env.astep(wrong)
            if terminated or truncated or [message.get("outcome") for message in observation] != ["error", "error"]:
                self.breach("step", "an unknown tool and an unreadable call are not both answered by an error message")
            finals = {tool.name for tool in env._declared.values() if tool.final}
            ordered = sorted(env.tool_schemas, key=lambda schema: schema["function"]["name"] in finals)
            for schema in ordered:
                env = await self.one_call(env, schema["function"])
            await self.state(env)
            await self.end(env)

    async def one_call(self, env: Env, function: dict[str, Any]) -> Env:
        """Calls one tool with made-up arguments; hands back an instance that can go on."""
        action = assistant("", [_call(function["name"], _arguments(function["parameters"]))])
        before = await env.aget_state() if env.state_level == "state" else None
        over = True
        with self.expecting(f"tool {function['name']}"):
            observation, _, terminated, truncated, _ = await env.astep(action)
            over = terminated or truncated
            self.observation(f"tool {function['name']}", observation, empty=False)
            if before is not None and not env.tainted:
                await self.twins(before, action, observation)
        if over or env.tainted:
            await self.end(env)
            return await self.fresh()
        return env

    async def twins(self, before: Any, action: Message, observation: list[Message]) -> None:
        """Other instances, at the state before `action`, must answer it alike."""
        answers = []
        for _ in range(2):
            twin = self.make()
            await twin.aset_state(json.loads(json.dumps(before)) if not isinstance(before, bytes) else before)
            answers.append((await twin.astep(action))[0])
            await self.end(twin)
        name = action["tool_calls"][0]["function"]["name"]
        if answers[0] != answers[1]:
            self.breach("state", f"two instances at one state answer {name} differently; draw from self.np_random")
        elif answers[0] != observation:
            self.breach(
                "state",
                f"an instance rebuilt from get_state answers {name} with {_contents(answers[0])!r:.80} instead of "
                f"{_contents(observation)!r:.80}; what tools change in place is set in setup, not in __init__",
            )

    async def state(self, env: Env) -> None:
        if env.state_level not in ("state", "handle"):
            self.lost_level(env)
            return
        with self.expecting("state"):
            state = await env.aget_state()
            if state is None:
                self.lost_level(env)
                return
            if not isinstance(state, bytes) and (problem := no_json(state, "state")):
                self.breach(
                    "state", f"get_state is neither JSON nor bytes: {problem}; set_state has to get what it returned"
                )
                return
            twin = self.make()
            await twin.aset_state(state)
            if env.state_level == "state" and await twin.aget_state() != state:
                self.breach("state", "set_state(get_state()) on a fresh instance gives another state")
            await self.end(twin)
            if isinstance(env, ToolEnv):
                self.secrets(env, state)

    async def later_state(self, env: Env) -> None:
        """After a turn there may be something in the state that it did not begin with."""
        if env.state_level in ("state", "handle"):
            result: Any = await env.astep(assistant(_TEXT))
            if isinstance(result, tuple) and len(result) == 5 and not (result[2] or result[3]):
                await self.state(env)

    def lost_level(self, env: Env) -> None:
        if isinstance(env, ToolEnv) and env.state_problem:
            self.breach(
                "state", f"{env.state_problem}, which is not JSON; a cut episode of this environment starts again"
            )

    def secrets(self, env: ToolEnv, state: Any) -> None:
        for tool in env._declared.values():
            for name in tool.secrets:
                if name not in tool.parameters and not hasattr(env, name):
                    self.breach(f"tool {tool.name}", f"secrets names {name!r}, neither its argument nor an attribute")
                elif name in state["attributes"]:
                    self.breach("state", f"holds the secret {name!r}; set it in __init__, which the state leaves out")

    async def limit(self) -> None:
        with self.expecting("afinish"):
            env = await self.fresh()
            reward, info = await env.afinish("turns")
            if not math.isfinite(reward):
                self.breach("afinish", f"the reward is {reward!r}, not a finite number")
            self.info("afinish", info)
            await self.end(env)

    async def conversation(self, chat: ChatLike) -> None:
        with self.expecting("chat"):
            env: Env = self.make()
            messages, _ = await env.areset(seed=_SEED, options={})
            for problem in chat_breaches(chat, messages, env.tool_schemas):
                self.breach("chat", problem)
            await self.end(env)

    async def end(self, env: Env) -> None:
        with self.expecting("close"):
            await env.aclose()

    async def closes(self, env: Env) -> None:
        with self.expecting("close"):
            await env.aclose()
            await env.aclose()

    def observation(self, place: str, observation: Any, empty: bool) -> bool:
        if not isinstance(observation, list) or not all(map(is_message, observation)):
            self.breach(place, f"the observation {observation!r:.80} is no list of messages")
            return False
        if not observation and not empty:
            self.breach(place, "the observation is empty, and the episode goes on; the policy would answer itself")
        if problem := no_json(observation, "observation"):
            self.breach(place, f"the observation is not JSON: {problem}")
        return True

    def info(self, place: str, info: Any) -> None:
        if not isinstance(info, dict):
            self.breach(place, f"info is {info!r:.80}, not a dict")
        elif problem := no_json(info, "info", _any_number):
            self.breach(place, f"info is not JSON: {problem}")
        else:
            for key in ("components", "metrics"):
                for name, value in dict(info.get(key) or {}).items():
                    if not isinstance(value, int | float):
                        self.breach(place, f"info[{key!r}][{name!r}] is {value!r:.40}, not a number")

    def gymnasium(self) -> None:
        """Gymnasium's own checker; its warnings count."""
        with warnings.catch_warnings(record=True) as caught, self.expecting("gymnasium"):
            warnings.simplefilter("always")
            env = self.make()
            check_gymnasium(env, skip_render_check=True)
            env.close()
        for warning in caught:
            self.breach("gymnasium", str(warning.message))


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _contents(messages: list[Message]) -> list[str]:
    return [message.get("content", "") for message in messages]


def _arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Made-up arguments that fit the required part of a schema."""
    properties = parameters.get("properties", {})
    return {name: _example(properties[name]) for name in parameters.get("required", ())}


def _example(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    if schema.get("type") == "object":
        return _arguments(schema)
    return {"integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}.get(schema.get("type", ""), "1")
