"""The calls of one assistant message: checked, run through the call log, answered with one tool message each."""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, cast

from gspo_agent.env.contract import CallMeta, Env
from gspo_agent.env.redaction import redact, secret_values
from gspo_agent.env.threads import DeadlinePassed
from gspo_agent.errors import EnvError, GspoAgentError, ToolError, is_fault
from gspo_agent.messages import Message, ToolCall, tool_result
from gspo_agent.tools import Tool
from gspo_agent.waiting import aside, part

if TYPE_CHECKING:
    from gspo_agent.env.tool_env import ToolEnv

Outcome = Literal["ok", "error", "timeout", "interrupted"]

_current: ContextVar[tuple[str, str]] = ContextVar("call", default=("", ""))


def call_id() -> str:
    """Inside a tool, or inside a step that is one call: the id of this call, for use as an idempotency key.

    It is the same in every life of the episode, and no other call of any attempt or run has it.
    """
    return "/".join(filter(None, _current.get()))


def call_turn() -> int:
    """Inside a tool: the turn in which it was called, the first being 0."""
    return int(_current.get()[1].split("/")[1])


@contextmanager
def calling(env: Env, id: str) -> Iterator[None]:
    """In here the call `id` of `env` is running."""
    before = _current.set((env.run_id, id))
    try:
        yield
    finally:
        _current.reset(before)


def step_id(env: Env, turn: int) -> str:
    """What the ids of a step's calls begin with; inside a step that is itself a call, the id of that."""
    return _current.get()[1] or f"{env.episode_id}/{turn}"


class Call:
    """One call that can run. A call that cannot is its answer, a Message."""

    __slots__ = ("id", "kwargs", "meta", "reply_id", "tool")

    def __init__(self, id: str, reply_id: str, tool: Tool, kwargs: dict[str, Any], meta: CallMeta) -> None:
        self.id, self.reply_id, self.tool, self.kwargs, self.meta = id, reply_id, tool, kwargs, meta

    def reply(self, content: str, outcome: Outcome) -> Message:
        return tool_result(content, name=self.tool.name, call_id=self.reply_id, outcome=outcome)


def prepare(env: ToolEnv, tools: Mapping[str, Tool], id: str, call: ToolCall, *, at_rest: bool) -> Call | Message:
    """Checks one call; what is wrong with it is told to the model.

    Args:
        at_rest: Nothing of an author's own runs between calls, or between the last one and the answer.
    """
    function: Mapping[str, Any] = call.get("function") or {}
    name, reply_id = as_text(function.get("name") or ""), call.get("id") or id
    secrets: tuple[str, ...] = ()
    try:
        if "error" in call:
            raise ToolError(f"the call could not be read: {call['error']}")
        if name not in tools:
            raise ToolError(_unknown(name, tools))
        tool, arguments = tools[name], function.get("arguments")
        arguments = {} if arguments is None else arguments
        if tool.secrets and isinstance(arguments, dict):
            secrets = secret_values(tool.secrets, arguments, env)
        kwargs = tool.validate(arguments)
    except ToolError as error:
        said = redact(as_text(f"Error: {error}"), secrets)
        return tool_result(said, name=name, call_id=reply_id, outcome="error")
    shown = redact(arguments, secrets, tool.secrets) if tool.secrets else arguments
    # A final call is followed by the score, parallel ones by each other.
    at_rest = at_rest and not tool.final and not tool.parallel
    return Call(id, reply_id, tool, kwargs, CallMeta(name, shown, tool.idempotent, secrets, env.turn_at(name), at_rest))


async def answer(env: ToolEnv, calls: Sequence[Call | Message]) -> tuple[list[Message], bool]:
    """One message per call, in order, and whether a final tool succeeded.

    Calls run one after another, unless all that can run are parallel. Nothing runs after a final call, or beside one
    that timed out and may still be running.
    """
    running = [call for call in calls if isinstance(call, Call)]
    if len(running) > 1 and all(call.tool.parallel for call in running):
        done = dict(zip(map(id, running), await _at_once(env, running), strict=True))
        messages = [done[id(call)] if isinstance(call, Call) else call for call in calls]
        return messages, any(map(_ended, calls, messages))
    messages, final = [], False
    for call in calls:
        if not isinstance(call, Call):
            messages.append(call)
        elif final or env.tainted:
            why = "the call before it ended the episode" if final else "a call before it timed out"
            messages.append(call.reply(f"Not run: {why}.", "error"))
        else:
            messages.append(await _run(env, call))
            final = _ended(call, messages[-1])
    return messages, final


def _ended(call: Call | Message, message: Message) -> bool:
    return isinstance(call, Call) and call.tool.final and message.get("outcome") == "ok"


async def _at_once(env: ToolEnv, calls: Sequence[Call]) -> list[Message]:
    async def one(call: Call) -> Message:
        with part():
            return await _run(env, call, beside=True)

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        with aside(""):
            return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _run(env: ToolEnv, call: Call, beside: bool = False) -> Message:
    message = await env.call_log.run(call.id, functools.partial(_invoke, env, call, beside), call.meta)
    # A log may answer by itself ("interrupted"), without knowing what the call was named.
    return cast(Message, {**call.reply("", "ok"), **message, "name": call.tool.name, "tool_call_id": call.reply_id})


async def _invoke(env: ToolEnv, call: Call, beside: bool) -> Message:
    """Runs the tool. What the model can act on is its message; what broke around it is an EnvError."""
    tool, secrets = call.tool, call.meta.secrets
    try:
        with calling(env, call.id):
            message = call.reply(as_text(await _apply(env, tool, call.kwargs, beside)), "ok")
    except DeadlinePassed:
        return call.reply(f"Error: timed out after {tool.timeout:g} s", "timeout")
    except ToolError as error:
        message = call.reply(as_text(str(error)), "error")
    except GspoAgentError:
        raise
    except (ConnectionError, TimeoutError, asyncio.CancelledError) as error:
        if not is_fault(error):
            raise
        said = redact(f"{type(env).__name__}.{tool.name}: {type(error).__name__}: {error}", secrets)
        raise EnvError(said) from None if secrets else error  # a traceback is written down too
    except BaseException as error:
        if not is_fault(error):
            raise
        message = call.reply(as_text(f"Error: {type(error).__name__}: {error}"), "error")
    if secrets:
        message["content"] = redact(message["content"], secrets)
    return message


async def _apply(env: ToolEnv, tool: Tool, kwargs: dict[str, Any], beside: bool) -> Any:
    function = tool.function.__get__(env) if tool.is_method else tool.function
    if not tool.is_async:
        return await env._call_in_thread(functools.partial(function, **kwargs), tool.timeout, beside)
    if tool.timeout is None:
        return await function(**kwargs)
    try:
        async with asyncio.timeout(tool.timeout) as deadline:
            return await function(**kwargs)
    except TimeoutError as error:
        # The tool's own TimeoutError is a fault of what it talked to, not its deadline.
        if deadline.expired():
            raise DeadlinePassed from error
        raise


def _unknown(name: str, tools: Mapping[str, Tool]) -> str:
    if not name:
        return "the call names no tool"
    near = difflib.get_close_matches(name, tools, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(map(repr, tools)) or 'none'}"
    return f"no tool {name!r}; {hint}"


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, None as nothing, the rest as JSON if it can be."""
    if result is None:
        return ""
    if isinstance(result, str):
        # A lone surrogate (badly decoded bytes) has no UTF-8, so neither tokenizer nor journal would take it.
        return result if result.isascii() else result.encode("utf-8", "replace").decode()
    try:
        return as_text(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError):
        return as_text(str(result))
