"""New weights to an engine, verified."""

from __future__ import annotations

from gspo_agent.engine.base import Engine, Weights
from gspo_agent.errors import EngineError


async def publish(weights: Weights, engine: Engine) -> None:
    """Returns when every later token comes from `weights`; EngineError where the engine reports another version."""
    await engine.update_weights(weights)
    if engine.weight_version != weights.version:
        raise EngineError(
            f"engine {engine.name!r} reports weights {engine.weight_version} after an update to {weights.version}; "
            "nothing may be sampled from it until it is updated again"
        )
