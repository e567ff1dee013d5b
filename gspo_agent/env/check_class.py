"""What can be said of an environment without an episode: its hooks, tools, tasks and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from gspo_agent.env.contract import Env
from gspo_agent.env.plain_json import no_json
from gspo_agent.env.spaces import is_message
from gspo_agent.env.tool_env import ToolEnv
from gspo_agent.errors import ToolError
from gspo_agent.messages import Message
from gspo_agent.tools import Tool

Breach = tuple[str, str]
"""Place, and what is wrong there."""

_LEVELS = ("state", "handle", "replay", "none")
_ARGUMENTS = {"prompt": "task", "score": "task, answer"}


def _hooks(kind: type[Env]) -> Iterator[Breach]:
    if kind.metadata.get("render_modes") is None:
        yield "metadata", 'lacks "render_modes"; write metadata = {"render_modes": []}'
    if kind.state_level not in _LEVELS:
        yield "state_level", f"{kind.state_level!r} is none of {', '.join(_LEVELS)}"
    if issubclass(kind, ToolEnv):
        halves = [kind._save is not None, kind._load is not None]
    else:
        halves = [kind.get_state is not Env.get_state, kind.set_state is not Env.set_state]
    if any(halves) and not all(halves):
        yield "state", "get_state and set_state belong together; one of them is not overridden"
    if issubclass(kind, ToolEnv):
        for hook in ("prompt", "score"):
            if kind.astep is ToolEnv.astep and getattr(kind, hook) is getattr(ToolEnv, hook):
                yield hook, f"is missing; write def {hook}(self, {_ARGUMENTS[hook]})"
    else:
        for name in ("reset", "step"):
            if getattr(kind, f"a{name}") is getattr(Env, f"a{name}"):
                yield name, f"neither {name} nor a{name} is overridden"


def _tools(kind: type[Env]) -> Iterator[Breach]:
    for tool in _declared(kind).values():
        place = f"tool {tool.name}"
        try:
            description = tool.schema["function"]["description"]
        except TypeError as error:
            yield place, str(error).removeprefix(f"{place}: ")
            continue
        if not description:
            yield place, "has no docstring; the model reads it"
        if tool.final and tool.parallel:
            yield place, "is final and parallel; a final tool ends the episode, so nothing can run beside it"


def _tasks(kind: type[Env]) -> Iterator[Breach]:
    given = kind.tasks("train")
    for number, task in enumerate(islice(given, 3) if given is not None else ()):
        if not isinstance(task, dict):
            yield "tasks", f"row {number} of 'train' is a {type(task).__name__}, not a dict"
        elif problem := no_json(task, "task"):
            yield "tasks", f"row {number} of 'train' is not JSON: {problem}"
    if isinstance(given, Sequence) and not len(given):
        yield "tasks", "'train' is empty"


def _demonstrations(kind: type[Env]) -> Iterator[Breach]:
    give = kind.demonstration
    if getattr(give, "__func__", give) is vars(Env)["demonstration"].__func__:
        return
    for progress in (0.0, 0.5, 1.0):
        problems = list(_demonstration_problems(_declared(kind), *give(random.Random(0), progress)))
        yield from (("demonstration", problem) for problem in problems)
        if problems:
            return


def _demonstration_problems(
    declared: Mapping[str, Tool], messages: list[Message], schemas: list[dict[str, Any]]
) -> Iterator[str]:
    if not messages or not all(map(is_message, messages)):
        yield f"gave {messages!r:.80}, no list of messages"
        return
    if messages[-1]["role"] != "assistant":
        yield "does not end with an assistant message"
    names = {schema["function"]["name"] for schema in schemas}
    for made in (made for message in messages for made in message.get("tool_calls") or []):
        name = made["function"]["name"]
        if name not in names:
            yield f"calls {name!r}, which its schemas do not have"
        elif name in declared:
            try:
                declared[name].validate(made["function"]["arguments"])
            except ToolError as error:
                yield str(error)


def _declared(kind: type[Env]) -> Mapping[str, Tool]:
    return kind._declared if issubclass(kind, ToolEnv) else {}


CLASS_CHECKS: dict[str, Callable[[type[Env]], Iterator[Breach]]] = {
    "hooks": _hooks,
    "tools": _tools,
    "tasks": _tasks,
    "demonstration": _demonstrations,
}
"""Where an exception of the check itself is reported -> the check."""
