"""The engine's contract on real SGLang servers; `.ci/sglang` runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo_agent.engine.base import Completion
from gspo_agent.engine.publish import publish
from tests.engine.models import scored
from tests.sglang.asking import ON_REAL_SERVERS, PROMPT, ask, cut, logprobs, model, opened, weights, whole
from tests.sglang.real import RealServer

pytestmark = ON_REAL_SERVERS


async def test_logprobs_are_those_of_the_learners_forward(servers: list[RealServer], directory: Path) -> None:
    async with opened(servers) as engine:
        await publish(weights(directory, 10), engine)
        done = await asyncio.gather(*(whole(engine, f"{n}.0.0/0", 80) for n in range(8)))
    for ids, parts in done:
        expected = scored(model(0), [ids], 1.0)[0][len(PROMPT) - 1 :].numpy()
        assert np.abs(np.concatenate([logprobs(part) for part in parts]) - expected).max() < 1e-4


async def test_of_g1_1_and_g1_10_only_the_one_that_is_meant_ends(
    servers: list[RealServer], directory: Path, end: int
) -> None:
    async with opened(servers[:1]) as engine:
        await publish(weights(directory, 10), engine)
        first: list[Completion] = []
        asked = [
            asyncio.create_task(whole(engine, "g1-1", 3000, first)),
            asyncio.create_task(whole(engine, "g1-10", 1000)),
        ]
        await asyncio.sleep(0.5)
        while not any(cut(part, end) for part in first):  # it may have met the model's own end just then
            await engine.abort(f"g1-1-{len(first)}")
            await asyncio.sleep(0.2)
        _, (ids, second) = await asyncio.gather(*asked)
    assert not any(cut(part, end) for part in second)
    assert len(ids) == len(PROMPT) + 1000


async def test_one_of_64_is_aborted_and_the_others_are_left_alone(
    servers: list[RealServer], directory: Path, end: int
) -> None:
    async with opened(servers) as engine:
        await publish(weights(directory, 10), engine)
        asked = [asyncio.create_task(ask(engine, f"{n}.0.0/0", 3000)) for n in range(64)]
        await asyncio.sleep(0.5)
        for number, task in enumerate(asked):
            await engine.abort(f"{number}.0.0/0")
            if cut(await task, end):  # else it had met the model's own end just then
                break
        done = await asyncio.gather(*asked)
    assert sum(cut(completion, end) for completion in done) == 1


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_weights_change_under_requests_and_every_token_has_its_version(
    servers: list[RealServer], directory: Path, mode: str
) -> None:
    async with opened(servers, pause_mode=mode) as engine:
        await publish(weights(directory, 10), engine)
        asked = [asyncio.create_task(whole(engine, f"{n}.0.0/0", 1000)) for n in range(8)]
        await asyncio.sleep(1.5)
        await publish(weights(directory, 11), engine)
        done = await asyncio.gather(*asked)
    both = 0
    for ids, parts in done:
        assert len(ids) == len(PROMPT) + 1000
        seen = [(s.weight_version, len(s)) for part in parts for s in part.segments]
        assert [version for version, _ in seen] == sorted(version for version, _ in seen)
        both += len({version for version, _ in seen}) == 2
        position = len(PROMPT)
        for part in parts:
            for segment in part.segments:
                if mode != "in_place":  # what stays computed under older weights moves the logprobs of newer tokens
                    expected = scored(model(segment.weight_version % 10), [ids], 1.0)[0].numpy()  # type: ignore[operator]
                    there = expected[position - 1 : position - 1 + len(segment)]
                    assert np.abs(segment.logprobs - there).max() < 1e-3  # type: ignore[operator]
                position += len(segment)
    assert both >= 4


async def test_while_it_is_paused_no_token_comes(servers: list[RealServer], directory: Path) -> None:
    async with opened(servers) as engine:
        await publish(weights(directory, 10), engine)
        before = asyncio.create_task(whole(engine, "0.0.0/0", 300))
        await asyncio.sleep(0.5)
        await engine.pause()
        behind = asyncio.create_task(ask(engine, "1.0.0/0", 5))
        ended = asyncio.create_task(ask(engine, "2.0.0/0", 5))
        await asyncio.sleep(1.0)
        assert not before.done()
        assert not behind.done()
        await engine.abort("2.0.0/0")
        assert (await asyncio.wait_for(ended, 10)).segments == ()
        await engine.resume()
        assert len((await before)[0]) == len(PROMPT) + 300
        assert (await behind).segments


async def test_a_server_that_is_killed_costs_no_request(directory: Path, servers: list[RealServer]) -> None:
    with RealServer(directory / "step-0", directory / "c.log") as third:
        third.wait()
        async with opened([servers[0], third]) as engine:
            await publish(weights(directory, 12), engine)
            asked = [asyncio.create_task(whole(engine, f"{n}.0.0/0", 300)) for n in range(16)]
            await asyncio.sleep(1.0)
            third.kill()
            done = await asyncio.gather(*asked)
    assert all(len(ids) == len(PROMPT) + 300 for ids, _ in done)
    assert {s.weight_version for _, parts in done for part in parts for s in part.segments} == {12}


def test_the_models_differ() -> None:
    """Else versions could be mixed up unseen."""
    with torch.no_grad():
        rows = [scored(model(seed), [[1, 2, 3, 4]], 1.0)[0] for seed in (0, 1, 2)]
    assert not torch.allclose(rows[0], rows[1])
    assert not torch.allclose(rows[1], rows[2])
