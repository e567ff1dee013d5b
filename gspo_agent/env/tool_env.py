"""ToolEnv: an environment as a prompt, tools and a score."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from gspo_agent.env.calls import answer, prepare, step_id
from gspo_agent.env.contract import Env, Observation, StateLevel, StepResult
from gspo_agent.env.episode import Episode, Snapshot, declared_tools, fixed_values, once, quietly, refuse_slots
from gspo_agent.env.generator import LateGenerator, decode_generator
from gspo_agent.env.given import Given
from gspo_agent.env.options import check_names
from gspo_agent.env.redaction import redact_message
from gspo_agent.env.scoring import verdict_within, weigh
from gspo_agent.env.shared import Shared, shared_of
from gspo_agent.env.spaces import as_messages
from gspo_agent.env.state import NotEncodable, decode, encode
from gspo_agent.env.threads import DeadlinePassed, Lane
from gspo_agent.errors import EnvError, ToolError, boundary
from gspo_agent.messages import Message
from gspo_agent.tools import Tool


class ToolEnv(LateGenerator, Env):
    """A new environment is `prompt`, `score` and methods with `@tool`; every hook may be sync or async.

    An assistant message without a tool call ends the episode, unless `reply` has something to say to it, and its
    content is the answer. A call of a tool with `final=True` that succeeds ends it too.

    The state is every attribute set at or after reset, and `np_random`. What `__init__` sets counts as the same in
    every instance: binding it anew is kept, changing it in place is not. An author's own `get_state` and `set_state`
    take the place of the attributes; `super().get_state()` in it gives those.
    """

    state_level: StateLevel = "state"
    logs_calls = True
    state_problem: str | None
    """Why the level fell to "none": the attribute that has no JSON form."""
    shared: Any
    """What `open_shared` returned."""
    metrics: dict[str, float]
    """Numbers to show beside the reward, filled by hooks and tools; empty at each reset, and part of the state."""

    __episode: Episode
    _pairs = (("reset", "areset"), ("step", "astep"))
    _declared: ClassVar[Mapping[str, Tool]] = {}
    _framework: ClassVar[frozenset[str]]
    _shares: ClassVar[bool] = False
    _steps: ClassVar[bool] = True  # nothing of an author's own is around a step: each is one of the runner's turns
    _save: ClassVar[Callable[[ToolEnv], Any] | None] = None
    _load: ClassVar[Callable[[ToolEnv, Any], None] | None] = None

    def setup(self, task: dict[str, Any]) -> Any:
        """Prepares the instance for `task`. Optional."""

    def prompt(self, task: dict[str, Any]) -> Any:
        """The question, as one user message's text or as a list of messages."""
        raise NotImplementedError(f"{type(self).__name__} needs prompt(self, task)")

    def tools(self) -> Any:
        """The tools of this task, asked for after `setup`. All that are declared, unless overridden."""
        return list(self._declared.values())

    def reply(self, task: dict[str, Any], answer: str) -> Any:
        """What is said to a message without a tool call, as by `prompt`; None ends the episode. Repeatable."""

    def score(self, task: dict[str, Any], answer: str) -> Any:
        """A number, or named components. Repeatable: after a crash it may run again. Raises Unscored without a verdict.

        Args:
            task: As it was given, whatever the tools did to theirs.
            answer: The content of the message that ended the episode; "" where a limit ended it.
        """
        raise NotImplementedError(f"{type(self).__name__} needs score(self, task, answer)")

    @once
    def close(self) -> Any:
        """Lets go of what `setup` opened; runs once for every setup that began, after failures too. Optional."""

    @classmethod
    def open_shared(cls, **options: Any) -> Any:
        """Opens what all episodes share (an index, a browser pool); `self.shared` in each. Optional."""

    @classmethod
    def close_shared(cls, shared: Any) -> Any:
        """Closes what `open_shared` returned. Optional."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls, *args, **kwargs)
        self.state_problem = None
        self.shared = None
        self.metrics = {}
        self.__episode = Episode()
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_slots(cls)
        cls._declared = declared_tools(cls, ToolEnv)
        own = vars(cls)
        if "close" in own:
            cls.close = once(own["close"])  # type: ignore[method-assign]
        cls._shares = cls._shares or "open_shared" in own
        # The author's state is a part of ours: turn, task and generator have to come back with it.
        for name, kept in (("get_state", "_save"), ("set_state", "_load")):
            if name in own:
                setattr(cls, kept, own[name])
                delattr(cls, name)
        cls.seals_state = cls._save is None and cls.get_state is ToolEnv.get_state and cls.aget_state is Env.aget_state
        cls._steps = cls.astep is ToolEnv.astep

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if self.tainted:
            raise EnvError(f"{type(self).__name__}: a call is still running in this instance; make a new one")
        await self._end_setup()
        self._seed(seed)
        await self._open_shared()
        self._remember_initial()
        given: dict[str, Any] | None = (options or {}).get("task")
        # The author gets a copy: a tool may change what setup took from the task, and a group's episodes share it.
        self.__episode = episode = Episode(self.__episode.shared, self.__episode.initial)
        if given is not None and given is self.known_task:
            episode.given = Given(given)
            episode.task, task = given, episode.given.copy
        else:
            with boundary(EnvError, f"{type(self).__name__}.sample_task"):
                task = copy.deepcopy(dict(self.sample_task() if given is None else given))
            episode.task = copy.deepcopy(task)
        episode.open, self.metrics = True, {}
        await self._hook("setup", task)
        messages = as_messages(await self._hook("prompt", task), f"{type(self).__name__}.prompt")
        self._use(await self._hook("tools"))
        episode.ready = True
        return messages, {}

    async def astep(self, action: Message) -> StepResult:
        episode = await self._going("step")
        messages: list[Message] = []
        final = True
        if calls := action.get("tool_calls"):
            step = step_id(self, episode.turn)
            ids = [f"{step}/{position}" for position in range(len(calls))]
            tools = episode.tools or {}
            # An author's state code has its own thread, and his own step may do anything around this one.
            rest = self.seals_state and self._steps
            prepared = [prepare(self, tools, id, call, at_rest=rest) for id, call in zip(ids, calls, strict=True)]
            messages, final = await answer(self, prepared)
        elif type(self).reply is not ToolEnv.reply:
            said = await self._hook("reply", copy.deepcopy(episode.task), action.get("content") or "")
            final = said is None
            messages = [] if final else as_messages(said, f"{type(self).__name__}.reply")
        # Only now: a step that is run again after a crash must give its calls the same ids.
        episode.turn += 1
        if not final:
            return messages, 0.0, False, False, {}
        reward, info = await self._end(action.get("content") or "")
        return messages, reward, True, False, info

    async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        if self.__episode.done:
            return 0.0, {}
        await self._going("score")
        return await self._end("")

    async def averdict(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        # The score has a deadline of its own, which leaves out the waiting for its quota.
        return await self.afinish(stop_reason)

    async def _going(self, what: str) -> Episode:
        """The episode, if `what` can be done in it; after set_state also what reset would have brought."""
        episode = self.__episode
        if not episode.ready or episode.done or self.tainted:
            why = "while a call still runs" if self.tainted else "after its end" if episode.done else "before reset"
            raise EnvError(f"{type(self).__name__}: {what} {why}")
        await self._open_shared()
        if episode.tools is None:
            self._use(await self._hook("tools"))
        return episode

    async def aclose(self) -> None:
        try:
            await self._end_setup()
        finally:
            self._release_thread()

    def get_state(self) -> Any:
        """Task, turn, attributes and generator as JSON. Of a tainted instance: what was true before the call that
        tainted it; None where that is unknown, and the last committed state holds."""
        episode = self.__episode
        if episode.keeping:
            return encode(self._changed(), "self", episode.given)
        if not self.tainted:
            return self._snapshot()
        return None if episode.last_good is None else episode.last_good | self._place()

    def set_state(self, state: Any) -> None:
        episode = self.__episode
        if episode.keeping:
            self._bind(decode(state, episode.given))
            return
        self._remember_initial()
        if "task" in state:
            episode.task, episode.task_json, episode.given = decode(state["task"]), state["task"], None
        elif self.known_task is None:
            raise EnvError(f"{type(self).__name__}: the state leaves the task out; set known_task before set_state")
        else:
            episode.task, episode.given = self.known_task, Given(self.known_task)
        episode.turn = state.get("turn", self.known_turn or 0)
        episode.done, episode.open, episode.ready = state["done"], True, True
        load, saved = type(self)._load, decode(state["attributes"], episode.given)
        if load is None:
            self._bind(saved)
        else:
            with self._keeping("set_state"):
                load(self, saved)
        self._np_generator, self._np_random_seed = decode_generator(state["np_random"])
        if "tool_schemas" in state:  # `tools` may be asynchronous; the next step asks it
            episode.tools, self.tool_schemas = None, state["tool_schemas"]
        else:
            self._use(self._declared.values())

    @classmethod
    def limited_names(cls) -> Collection[str] | None:
        return cls._limited(cls._declared) if cls.tools is ToolEnv.tools else None

    @classmethod
    def _limited(cls, tools: Iterable[str]) -> list[str]:
        return [*tools, "score", *(() if cls.logs_calls else ("step",))]

    def redact(self, message: Message) -> Message:
        tools = {**self._declared, **(self.__episode.tools or {})}
        names = {name: tool.secrets for name, tool in tools.items() if tool.secrets}
        return redact_message(message, names, self) if names else message

    def _snapshot(self) -> dict[str, Any] | None:
        """The state, as the same object while it is seen to be the same; None, and the level "none", without one."""
        episode, save = self.__episode, type(self)._save
        try:
            generator = episode.generator.encode(self._np_generator, self._np_random_seed)
            place = self._place()
            changed = self._changed() if save is None else None
            fixed = fixed_values(changed) if changed is not None and self.seals_state else None
            if episode.last is not None and episode.last.holds(fixed, generator, place):
                return episode.last.value
            if save is None:
                saved = encode(changed, "self", episode.given)
            else:
                with self._keeping("get_state"):
                    saved = encode(save(self), "get_state()", episode.given)
            value = {**place, "attributes": saved, "np_random": generator}
            if episode.given is None:
                value["task"] = episode.task_json = episode.task_json or encode(episode.task, "task")
            if type(self).tools is not ToolEnv.tools:
                value["tool_schemas"] = self.tool_schemas
            episode.last = None if fixed is None else Snapshot(fixed, generator, place, value)
            return value
        except NotEncodable as problem:
            self.state_level, self.state_problem = "none", str(problem)
            return None

    def _place(self) -> dict[str, Any]:
        return self.__episode.place(self.known_turn if self._steps else None)

    @contextmanager
    def _keeping(self, what: str) -> Iterator[None]:
        self.__episode.keeping = True
        try:
            with boundary(EnvError, f"{type(self).__name__}.{what}"):
                yield
        except NotEncodable as problem:
            raise problem from None
        finally:
            self.__episode.keeping = False

    def _changed(self) -> dict[str, Any]:
        """The attributes that are not as `__init__` left them."""
        initial, framework = self.__episode.initial or {}, type(self)._framework
        return {
            name: value
            for name, value in vars(self).items()
            if name not in framework and (name not in initial or value is not initial[name])
        }

    def _bind(self, attributes: dict[str, Any]) -> None:
        initial = self.__episode.initial or {}
        for name in vars(self).keys() - self._framework - attributes.keys() - initial.keys():
            delattr(self, name)
        vars(self).update(attributes)

    def _remember_initial(self) -> None:
        if self.__episode.initial is None:
            self.__episode.initial = {k: v for k, v in vars(self).items() if k not in self._framework}

    def _state_in_thread(self) -> bool:
        own = type(self)._save is not None or type(self)._load is not None
        return own and not inspect.iscoroutinefunction(self.setup) and not self.tainted

    async def _call_in_thread(self, function: Callable[[], Any], timeout: float | None, beside: bool) -> Any:
        """Runs a synchronous tool in the instance's thread, or in one `beside` it."""
        before = None
        if timeout is not None:
            before = await self._in_thread(self._snapshot) if self._state_in_thread() else self._snapshot()
        try:
            if not beside:
                return await self._in_thread(function, timeout=timeout)
            lane = Lane()
            try:
                return await lane.run(function, timeout=timeout)
            finally:
                self.tainted = self.tainted or lane.stuck
                lane.release()
        except DeadlinePassed:
            self.__episode.last_good = before
            raise

    async def _hook(self, name: str, *args: Any) -> Any:
        """Calls the author's hook, in the instance's thread where it is synchronous; what it raises is an EnvError."""
        function = getattr(self, name)
        if name in ("setup", "tools") and getattr(type(self), name) is getattr(ToolEnv, name):
            return function(*args)
        with boundary(EnvError, f"{type(self).__name__}.{name}"):
            try:
                if inspect.iscoroutinefunction(function):
                    return await function(*args)
                result = await self._in_thread(function, *args)
                return await result if inspect.isawaitable(result) else result
            except ToolError as error:
                raise EnvError(f"{type(self).__name__}.{name}: ToolError: {error}") from error

    async def _end_setup(self) -> None:
        """Runs the author's `close`, if a setup began."""
        episode, hook = self.__episode, self.close
        if not episode.open:
            return
        episode.open, episode.closing = False, True
        try:
            if type(self).close is ToolEnv.close:
                return
            if getattr(type(self).close, "asynchronous", False):
                await hook()
            elif self.tainted:
                # Behind the stuck call, in its thread, whenever that ends; nobody waits for it.
                self._after_stuck_call(functools.partial(quietly, hook))
            else:
                await self._in_thread(hook)
        except Exception as error:
            # After a failed setup, close meets what was never opened; the setup's own error is the one to tell.
            if episode.ready:
                raise EnvError(f"{type(self).__name__}.close: {type(error).__name__}: {error}") from error
        finally:
            episode.closing = self.tainted

    def _is_closing(self) -> bool:
        return self.__episode.closing

    async def _open_shared(self) -> None:
        if self._shares and self.shared is None:
            self.shared = await (self.__episode.shared or shared_of(type(self))).get()

    def _share(self, shared: Shared) -> None:
        """Takes the shared object from `shared` instead of the class's own."""
        self.__episode.shared = shared

    async def _end(self, text: str) -> tuple[float, dict[str, Any]]:
        reward, components = await self._score(text)
        self.__episode.done = True
        return reward, {"components": components, **({"metrics": dict(self.metrics)} if self.metrics else {})}

    async def _score(self, text: str) -> tuple[float, dict[str, float]]:
        name, task = type(self).__name__, copy.deepcopy(self.__episode.task)
        async with self.turn_at("score"), verdict_within(self.score_seconds, f"{name}.score"):
            score = await self._hook("score", task, text)
        return weigh(score, self.reward_weights, name)

    def _use(self, tools: Iterable[Any]) -> None:
        """Takes Tools, `self.name` of a declared tool, or plain functions."""
        by_function = {tool.function: tool for tool in self._declared.values()}
        known: dict[str, Tool] = {}
        with boundary(EnvError, f"{type(self).__name__}.tools"):
            for given in tools:
                found = by_function.get(getattr(given, "__func__", given), given)
                found = found if isinstance(found, Tool) else Tool(found)
                if found.name in known:
                    raise EnvError(f"{type(self).__name__}.tools: two tools are named {found.name!r}")
                known[found.name] = found
            self.tool_schemas = [tool.schema for tool in known.values()]
            names = self._limited([*self._declared, *known])
            check_names(self._quotas, names, f"{type(self).__name__}: quotas: nothing here is called")
        self.__episode.tools = known


_GYMNASIUM = {"_np_generator", "_np_random_seed", "spec"}
ToolEnv._framework = frozenset(vars(ToolEnv())) - {"metrics"} | _GYMNASIUM | {"state_level"}
