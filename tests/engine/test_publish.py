from __future__ import annotations

import asyncio

import pytest

from gspo_agent.engine.base import Sampling, Weights
from gspo_agent.engine.local import LocalEngine
from gspo_agent.engine.publish import publish
from gspo_agent.errors import EngineError
from gspo_agent.testing import ScriptedEngine
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


@pytest.mark.parametrize("local", [True, False])
async def test_publishing_aborts_none_of_sixteen_requests_that_are_decoded(local: bool) -> None:
    """Each goes on under the new weights, and brings every token that it was asked for."""
    engine: LocalEngine | ScriptedEngine = (
        LocalEngine(qwen3(), max_running=8)  # eight are decoded, eight wait for a row
        if local
        else ScriptedEngine(lambda prompt, seed: list(range(120)), turn_mark=1, chunk=4)
    )
    requests = [
        asyncio.create_task(engine.generate([n + 2, 1], Sampling(100, seed=n), request_id=str(n))) for n in range(16)
    ]
    for version in (2_000_003, 2_000_004, 2_000_005):
        if isinstance(engine, LocalEngine):
            begun = engine.stats()["tokens"]
            while engine.stats()["tokens"] < begun + 80:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await publish(weights_of(qwen3(seed=1), version), engine)
        else:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await publish(Weights(version, None, lambda: ()), engine)
    completions = await asyncio.gather(*requests)
    await engine.close()
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert {sum(map(len, completion.segments)) for completion in completions} == {100}
    versions = [[segment.weight_version for segment in completion.segments] for completion in completions]
    assert all(found == sorted(found) for found in versions)  # type: ignore[type-var]
    assert sum(len(found) > 1 for found in versions) >= 8


async def test_an_engine_that_kept_its_weights_is_named() -> None:
    engine = Stubborn(qwen3(), name="mine", weight_version=1)
    with pytest.raises(EngineError, match="'mine' reports weights 1 after an update to 2"):
        await publish(weights_of(qwen3(seed=1), 2), engine)
