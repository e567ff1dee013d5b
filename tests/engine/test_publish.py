from __future__ import annotations

import pytest

from gspo_agent.engine.base import Sampling, Weights
from gspo_agent.engine.local import LocalEngine
from gspo_agent.engine.publish import publish
from gspo_agent.errors import EngineError
from tests.engine.models import qwen3, weights_of


class Stubborn(LocalEngine):
    """Takes no new weights and says nothing."""

    async def update_weights(self, weights: Weights) -> None:
        return None


async def test_after_publishing_every_token_is_of_the_new_version() -> None:
    engine = LocalEngine(qwen3())
    await publish(weights_of(qwen3(seed=1), 2_000_003), engine)
    completion = await engine.generate([1, 2, 3], Sampling(4), request_id="r")
    assert [segment.weight_version for segment in completion.segments] == [2_000_003]
    await engine.close()


async def test_an_engine_that_kept_its_weights_is_named() -> None:
    engine = Stubborn(qwen3(), name="mine", weight_version=1)
    with pytest.raises(EngineError, match="'mine' reports weights 1 after an update to 2"):
        await publish(weights_of(qwen3(seed=1), 2), engine)
