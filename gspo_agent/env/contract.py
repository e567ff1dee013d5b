"""Env: what every environment promises, as a Gymnasium environment whose observations and actions are messages."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Literal, Self

import gymnasium

from gspo_agent.env.scoring import verdict_within
from gspo_agent.env.spaces import AssistantMessage, MessageList
from gspo_agent.env.threads import Lane, run_sync
from gspo_agent.errors import EnvError, StateLost, boundary
from gspo_agent.messages import Message
from gspo_agent.quota import Quota

StateLevel = Literal["state", "handle", "replay", "none"]
Observation = list[Message]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]

_PAIRS = (("reset", "areset"), ("step", "astep"), ("close", "aclose"))
_SAMPLED_TASKS = 256
_FREE: AbstractAsyncContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class CallMeta:
    """What a call log may write down about a call. Secret values are already out of `arguments`."""

    name: str
    arguments: Mapping[str, Any]
    idempotent: bool = False
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Values that must not be written anywhere."""
    turn: AbstractAsyncContextManager[None] = field(default=_FREE, repr=False, compare=False)
    """To be entered before the call begins and left after it: its turn at a quota."""
    at_rest: bool = False
    """From its end until the next call begins, or the step is answered, nothing of the environment runs: the state
    after it may be looked at as late as that."""


class CallLog:
    """Every tool call passes through one. This one only runs it; a runner installs one that journals."""

    async def run(self, call_id: str, function: Callable[[], Awaitable[Any]], meta: CallMeta) -> Any:
        """Returns what `function()` returned: JSON (a tool message), now or in an earlier life.

        What `function` raises is a fault of the environment, not an answer, and is not recorded.
        """
        async with meta.turn:
            return await function()


class Env(gymnasium.Env[Observation, Message]):
    """A conversation partner: `reset` gives the first messages, `step` takes an assistant message.

    An author overrides either `reset/step` or `areset/astep`; the other pair is filled in. Synchronous methods run in
    a thread of the framework, one per instance, when the asynchronous pair is awaited.

    >>> class Echo(Env):
    ...     def reset(self, *, seed=None, options=None):
    ...         super().reset(seed=seed)
    ...         return [user("Say something.")], {}
    ...     def step(self, action):
    ...         return [], float(bool(action["content"])), True, False, {}
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    state_level: StateLevel = "none"
    """How an episode survives its process: "state" by get_state/set_state (declared by overriding both), "handle" by a
    handle to something outside, "replay" by repeating the actions, "none" by starting again."""
    logs_calls: ClassVar[bool] = False
    """Whether `astep` passes its tool calls through `call_log` itself; otherwise the whole step is one call."""
    seals_state: ClassVar[bool] = False
    """Whether nobody changes what `get_state` returned, so that the same object again is the same state; no author's
    code runs in it."""

    call_log: CallLog
    run_id: str
    """Set by the runner, as is `episode_id`, before reset or set_state: together they name an episode everywhere."""
    episode_id: str
    """Call ids are f"{episode_id}/{turn}/{position}"."""
    known_task: dict[str, Any] | None
    """Set by a runner that keeps the task of this episode: the state may leave it out, and set_state find it here."""
    known_turn: int | None
    """As known_task: how many steps were answered when this instance was told its episode."""
    score_seconds: float | None
    """Set by the runner: how long one score may take."""
    tool_schemas: list[dict[str, Any]]
    """After reset: what the chat template gets."""
    tainted: bool
    """A synchronous call was given up on and may still be running: build a fresh instance from `get_state()`."""
    reward_weights: Mapping[str, float] | None
    """Component of the score -> weight; None: all weigh 1."""

    __lane: Lane
    _quotas: Mapping[str, Quota]
    _pairs: ClassVar[tuple[tuple[str, str], ...]] = _PAIRS

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # In __new__, so that an author's __init__ need not call ours.
        self = super().__new__(cls)
        self.call_log = CallLog()
        self.run_id = self.episode_id = ""
        self.known_task = self.known_turn = self.score_seconds = None
        self.tool_schemas = []
        self.tainted = False
        self.reward_weights = None
        self.observation_space = MessageList()
        self.action_space = AssistantMessage()
        self.__lane = Lane()
        self._quotas = {}
        return self

    def __init__(self, *, rewards: Mapping[str, float] | None = None) -> None:
        if rewards is not None:
            self.reward_weights = dict(rewards)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for sync_name, async_name in cls._pairs:
            _fill_missing_half(cls, sync_name, async_name)
        own = vars(cls)
        if "get_state" in own and "set_state" in own and "state_level" not in own:
            cls.state_level = "state"
        if not own.get("logs_calls") and ("step" in own or "astep" in own):
            cls.logs_calls = False

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The first messages of an episode of `options["task"]`, or of `sample_task()`. This one only seeds."""
        gymnasium.Env.reset(self, seed=seed)
        return [], {}

    async def astep(self, action: Message) -> StepResult:
        """The messages that answer `action`, reward, terminated, truncated, info.

        `info["components"]` are the unweighted parts of the reward, at the end; `info["metrics"]` are only shown.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither step nor astep")

    async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        """A limit of the runner ended the episode: its last reward and info."""
        return 0.0, {}

    def get_state(self) -> Any:
        """JSON or bytes from which `set_state` makes a fresh instance go on; None at the levels "replay" and "none"."""
        return None

    def set_state(self, state: Any) -> None:
        """Takes the place of reset on a fresh instance. Raises StateLost where a handle leads nowhere."""
        raise StateLost(f"{type(self).__name__} keeps no state (state_level {self.state_level!r})")

    async def averdict(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        """`afinish`, as the runner calls it. Raises Unscored past `score_seconds`."""
        async with verdict_within(self.score_seconds, f"{type(self).__name__}.afinish"):
            return await self.afinish(stop_reason)

    async def aget_state(self) -> Any:
        """`get_state` for a runner: an author's own runs in the thread of the synchronous hooks."""
        return await self._in_thread(self.get_state) if self._state_in_thread() else self.get_state()

    async def aset_state(self, state: Any) -> None:
        """`set_state` for a runner: an author's own runs in the thread of the synchronous hooks."""
        if self._state_in_thread():
            await self._in_thread(self.set_state, state)
        else:
            self.set_state(state)

    def _state_in_thread(self) -> bool:
        """Whether what the author's state code touches belongs to the instance's thread, and that is free."""
        own = type(self).get_state is not Env.get_state
        return own and hasattr(type(self).areset, "__wrapped__") and not self.tainted

    async def aclose(self) -> None:
        """Lets go of everything; may be called twice."""
        self._release_thread()

    async def adetach(self) -> None:
        """Called instead of `aclose` where the episode was cut and goes on in another instance, now or later.

        At the level "handle" what the state leads to has to stay, so only the thread is given back; override it to
        close a connection, say. At the other levels this is `aclose`.
        """
        if self.state_level == "handle":
            self._release_thread()
        else:
            await self.aclose()

    @classmethod
    def destroy_leftovers(cls, run_id: str, living: Collection[str], **options: Any) -> Any:
        """Destroys what dead processes of this run left outside: containers, subprocesses, directories. Optional.

        Called once whenever a run starts, before any episode begins or goes on, which waits five minutes for it at
        most; may be async. What an environment makes outside is best named after `run_id` and `episode_id`, so that it
        is found here.

        Args:
            living: Ids of the episodes of the run that will go on, in whatever environment. At the level "handle"
                theirs have to stay; at the others the next instance makes everything anew.
            options: Those of the constructor that it has parameters for.
        """

    def turn_at(self, name: str) -> AbstractAsyncContextManager[None]:
        """The quota of a tool, of "score", or of "step" where a whole step is one call; else a context of no effect."""
        return self._quotas.get(name, _FREE)

    @classmethod
    def limited_names(cls) -> Collection[str] | None:
        """What `quotas` may name; None where only an instance knows."""
        return ("step",)

    def _limit(self, quotas: Mapping[str, Quota]) -> None:
        """Takes the quotas that all instances of a factory share."""
        self._quotas = quotas

    def redact(self, message: Message) -> Message:
        """`message` without secret values, for records that are read by people."""
        return message

    def sample_task(self) -> dict[str, Any]:
        """A task for a reset without one: drawn with `np_random` from the first training tasks."""
        tasks = type(self).tasks("train")
        if tasks is None:
            return {}
        if not isinstance(tasks, Sequence):
            tasks = list(islice(tasks, _SAMPLED_TASKS))
        if not len(tasks):
            raise EnvError(f"{type(self).__name__}.tasks('train') is empty")
        return dict(tasks[int(self.np_random.integers(len(tasks)))])

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Sequence[dict[str, Any]] | Iterable[dict[str, Any]] | None:
        """The tasks of a split, lazy or infinite if need be; a Sequence is read by position. None: it has none."""
        return None

    @classmethod
    def check_task(cls, task: dict[str, Any], **options: Any) -> Any:
        """Raises ValueError with what is wrong with a task; asked for every row of a task file before a run begins.

        Optional. `options`: those of the constructor that it has parameters for.
        """

    @classmethod
    def demonstration(
        cls, rng: random.Random, progress: float, **options: Any
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """One conversation and its tool schemas for a cold start; `progress` runs from 0 to 1 through it."""
        raise NotImplementedError(f"{cls.__name__} gives no demonstrations")

    async def _in_thread(self, function: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> Any:
        """Runs synchronous code of the author in this instance's thread; taints the instance if it is given up on."""
        try:
            return await self.__lane.run(function, *args, timeout=timeout)
        finally:
            self.tainted = self.tainted or self.__lane.stuck

    def _after_stuck_call(self, function: Callable[[], None]) -> None:
        """Queues `function`, which must not raise, behind a call that was given up on."""
        self.__lane.put(function)

    def _release_thread(self) -> None:
        self.__lane.release()


def _fill_missing_half(cls: type[Env], sync_name: str, async_name: str) -> None:
    """Of a pair, the half that is defined later in the class hierarchy is the author's; the other follows it."""
    sync_age, async_age = _age(cls, sync_name), _age(cls, async_name)
    if cls.__mro__[min(sync_age, async_age)] in (Env, gymnasium.Env):
        return
    if inspect.iscoroutinefunction(getattr(cls, sync_name)):
        raise TypeError(f"{cls.__name__}.{sync_name} is asynchronous; name it {async_name}")
    if sync_age < async_age:
        setattr(cls, async_name, _asynchronous(getattr(cls, sync_name), sync_name, async_name))
    elif async_age < sync_age:
        setattr(cls, sync_name, _synchronous(getattr(cls, async_name), sync_name))


def _age(cls: type, name: str) -> int:
    return next(position for position, base in enumerate(cls.__mro__) if name in vars(base))


def _asynchronous(function: Callable[..., Any], sync_name: str, name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    async def method(self: Env, *args: Any, **kwargs: Any) -> Any:
        with boundary(EnvError, f"{type(self).__name__}.{sync_name}"):
            try:
                return await self._in_thread(functools.partial(function, self, *args, **kwargs))
            finally:
                if name == "aclose":
                    self._release_thread()

    method.__name__ = name
    return method


def _synchronous(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    # The function itself, not the attribute: super().step() must reach this class's half, not the caller's.
    @functools.wraps(function)
    def method(self: Env, *args: Any, **kwargs: Any) -> Any:
        return run_sync(function(self, *args, **kwargs))

    method.__name__ = name
    return method
