"""Brings a fresh environment to where a journaled episode stood."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from gspo_agent.clock import Clock, within
from gspo_agent.env import CallLog, Env
from gspo_agent.env.calls import calling
from gspo_agent.errors import EnvError, ReplayError, StateLost, boundary
from gspo_agent.messages import Message
from gspo_agent.rollout.events import Episode
from gspo_agent.rollout.recorder import KEPT
from gspo_agent.waiting import told

_LEAST_SECONDS = 60.0  # for one hook, however fast the whole episode was ...
_TIMES_AS_LONG = 2.0  # ... which took all its turns, and the engine's time


async def rebuild(env: Env, episode: Episode) -> None:
    """Sets the environment's state, or repeats the recorded actions and compares every answer.

    The environment has been introduced to its episode. Raises StateLost where the level, or what is left, gives no way
    back: the episode has to start again. Raises ReplayError at the first answer that differs, and EnvError where one
    takes twice as long as the whole episode had taken, and more than a minute.
    """
    name = type(env).__name__
    if env.state_level == "replay":
        await _replay(env, episode)
    elif env.state_level in KEPT and episode.state is not None:
        async with _in_time(f"{name}.set_state", episode):
            await env.aset_state(episode.state.value)
    else:
        raise StateLost(f"{name} kept no state to go on from (state_level {env.state_level!r})")
    if not env.tool_schemas:
        env.tool_schemas = episode.tools


async def _replay(env: Env, episode: Episode) -> None:
    log, env.call_log = env.call_log, CallLog()  # the calls are in the journal already
    name = type(env).__name__
    async with _in_time(f"{name}.reset, which is replayed", episode):
        observed, _ = await env.areset(seed=episode.trajectory.seed, options={"task": env.known_task})
    _compare(0, episode.history[0][1], observed)
    for turn, (action, recorded) in enumerate(episode.history[1:], start=1):
        assert action is not None
        async with _in_time(f"{name}.step, which is replayed to turn {turn}", episode):
            observed = await _again(env, turn - 1, action)
        _compare(turn, recorded, observed)
    env.call_log = log


async def _again(env: Env, turn: int, action: Message) -> list[Message]:
    """A step under the call ids of the first time, for whoever keeps accounts outside."""
    async with env.turn_at("step"):
        with calling(env, f"{env.episode_id}/{turn}/0") if not env.logs_calls else nullcontext():
            observed, *_ = await env.astep(action)
    return observed


@asynccontextmanager
async def _in_time(what: str, episode: Episode) -> AsyncIterator[None]:
    """Ends a hook that hangs, so that the start does not. Waiting for a quota or a judge does not count."""
    own, seconds = Clock(), max(_LEAST_SECONDS, _TIMES_AS_LONG * episode.seconds)
    try:
        with told(lambda _: own.stop(), own.go):
            async with within(own, seconds) as deadline:
                with boundary(EnvError, what):
                    yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise EnvError(
            f"{what}, takes longer than {seconds:.2g} s after a restart, and than twice what the whole episode took; "
            "see what it waits for: the episode has failed and is tried again"
        ) from None


def _compare(turn: int, recorded: list[Message], observed: list[Message]) -> None:
    if recorded != observed:
        raise ReplayError(turn, recorded, observed)
