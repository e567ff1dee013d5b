"""TextEnv: a Gymnasium environment that is not ours, or arrives wrapped, as an Env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from gspo_agent.env.contract import Env, Observation, StepResult
from gspo_agent.env.options import check_names
from gspo_agent.env.spaces import is_message
from gspo_agent.env.threads import run_sync
from gspo_agent.errors import EnvError, boundary
from gspo_agent.messages import Message, user


class TextEnv(Env):
    """Drives the outer `reset/step` of a string-in, string-out environment in a thread of its own.

    The assistant's content is the action; an observation becomes a user message; `options` of reset are the task,
    whose `seed`, if it has one, holds for the whole group. Nothing of it can be saved, so an episode goes on by
    repeating its actions. One of ours inside a wrapper gets and gives messages.
    """

    state_level = "replay"

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], name: str) -> None:
        super().__init__()
        self.make, self.name = make, name
        self.outer: gymnasium.Env[Any, Any] | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        gymnasium.Env.reset(self, seed=seed)
        task = dict((options or {}).get("task") or {})
        with boundary(EnvError, f"{self.name}.reset"):
            observation, info = await self._in_thread(self._reset, int(task.pop("seed", seed) or 0), options, task)
        self.tool_schemas = list(self._inner.tool_schemas) if self._inner is not None else []
        return self._messages(observation), _shown(info)

    async def astep(self, action: Message) -> StepResult:
        outer = self.outer
        if outer is None:
            raise EnvError(f"{self.name}: step before reset")
        given = action.get("content") or "" if self._inner is None else action
        with boundary(EnvError, f"{self.name}.step"):
            observation, reward, terminated, truncated, info = await self._in_thread(outer.step, given)
        return self._messages(observation), float(reward), bool(terminated), bool(truncated), _shown(info)

    async def afinish(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        inner = self._inner
        if inner is None:
            return 0.0, {}
        reward, info = await self._in_thread(lambda: run_sync(inner.afinish(stop_reason)))
        return reward, info

    async def averdict(self, stop_reason: str) -> tuple[float, dict[str, Any]]:
        return await self.afinish(stop_reason)  # one of ours inside keeps to score_seconds by itself

    async def aclose(self) -> None:
        outer, self.outer = self.outer, None
        try:
            if outer is not None and not self.tainted:
                with boundary(EnvError, f"{self.name}.close"):
                    await self._in_thread(outer.close)
        finally:
            self._release_thread()

    @property
    def _inner(self) -> Env | None:
        """One of ours inside the wrappers."""
        inner = None if self.outer is None else self.outer.unwrapped
        return inner if isinstance(inner, Env) else None

    def _reset(self, seed: int, options: dict[str, Any] | None, task: dict[str, Any]) -> Any:
        if self.outer is None:
            self.outer = self.make()
        inner = self._inner
        if inner is None:
            check_names(self._quotas, self.limited_names() or (), f"{self.name}: quotas: nothing here is called")
            return self.outer.reset(seed=seed, options=task or None)
        inner.run_id, inner.episode_id = self.run_id, self.episode_id
        inner.reward_weights, inner.score_seconds = self.reward_weights, self.score_seconds
        inner._limit({name: quota for name, quota in self._quotas.items() if name != "step"})
        return self.outer.reset(seed=seed, options=options)

    def _messages(self, observation: Any) -> Observation:
        if isinstance(observation, str | np.str_):
            return [user(str(observation))] if observation else []
        if isinstance(observation, list) and all(is_message(message) for message in observation):
            return [dict(message) for message in observation]  # type: ignore[misc]
        raise EnvError(
            f"{self.name}: the observation {observation!r:.80} is no text; wrap the environment so that it is"
        )


def _shown(info: dict[str, Any]) -> dict[str, Any]:
    """Of a foreign info: our own two keys, and numbers as metrics. The rest may be any object."""
    numbers = {k: float(v) for k, v in info.items() if isinstance(v, bool | int | float | np.number | np.bool_)}
    shown: dict[str, Any] = {"components": dict(info["components"])} if "components" in info else {}
    if metrics := {**numbers, **info.get("metrics", {})}:
        shown["metrics"] = metrics
    return shown
