"""Brings a fresh environment to where a journaled episode stood."""

from __future__ import annotations

from contextlib import nullcontext

from gspo_agent.env import CallLog, Env
from gspo_agent.env.calls import calling
from gspo_agent.errors import EnvError, ReplayError, StateLost, boundary
from gspo_agent.messages import Message
from gspo_agent.rollout.events import Episode
from gspo_agent.rollout.recorder import KEPT


async def rebuild(env: Env, episode: Episode) -> None:
    """Sets the environment's state, or repeats the recorded actions and compares every answer.

    The environment has been introduced to its episode. Raises StateLost where the level, or what is left, gives no way
    back: the episode has to start again. Raises ReplayError at the first answer that differs.
    """
    if env.state_level == "replay":
        await _replay(env, episode)
    elif env.state_level in KEPT and episode.state is not None:
        with boundary(EnvError, f"{type(env).__name__}.set_state"):
            await env.aset_state(episode.state.value)
    else:
        raise StateLost(f"{type(env).__name__} kept no state to go on from (state_level {env.state_level!r})")
    if not env.tool_schemas:
        env.tool_schemas = episode.tools


async def _replay(env: Env, episode: Episode) -> None:
    log, env.call_log = env.call_log, CallLog()  # the calls are in the journal already
    observed, _ = await env.areset(seed=episode.trajectory.seed, options={"task": env.known_task})
    _compare(0, episode.history[0][1], observed)
    for turn, (action, recorded) in enumerate(episode.history[1:], start=1):
        assert action is not None
        # A step that is repeated has the call ids of the first time, for whoever keeps accounts outside.
        async with env.turn_at("step"):
            with calling(env, f"{env.episode_id}/{turn - 1}/0") if not env.logs_calls else nullcontext():
                observed, *_ = await env.astep(action)
        _compare(turn, recorded, observed)
    env.call_log = log


def _compare(turn: int, recorded: list[Message], observed: list[Message]) -> None:
    if recorded != observed:
        raise ReplayError(turn, recorded, observed)
