"""ScriptedEngine keeps the engine's contract and finds out a client that does not keep its own."""

from __future__ import annotations

import asyncio

import pytest

from gspo_agent.engine.base import Sampling, Weights
from gspo_agent.errors import EngineError
from gspo_agent.messages import user
from gspo_agent.testing import ByteChat, ScriptedEngine

CHAT = ByteChat()
PROMPT = CHAT.open([user("a")], [])
TURN = CHAT.turn("hello world")
STOPS = CHAT.stop_token_ids


def engine(**options: int) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, seed: TURN, **options)


async def collect(engine: ScriptedEngine, tokens: int) -> tuple[list[int], list[float], list[str]]:
    ids: list[int] = []
    logprobs: list[float] = []
    reasons: list[str] = []
    while not ids or ids[-1] not in STOPS:
        sampling = Sampling(tokens, stop_token_ids=STOPS, seed=3)
        completion = await engine.generate([*PROMPT, *ids], sampling, request_id=f"r{len(reasons)}/")
        for segment in completion.segments:
            assert segment.logprobs is not None
            ids += segment.token_ids.tolist()
            logprobs += segment.logprobs.tolist()
        reasons.append(completion.finish_reason)
    return ids, logprobs, reasons


async def test_requests_of_any_length_and_cuts_anywhere_give_the_same_turn() -> None:
    whole = await collect(engine(), 100)
    assert whole[0] == TURN
    assert whole[2] == ["stop"]
    for tokens in (1, 2, 5):
        ids, logprobs, reasons = await collect(engine(), tokens)
        assert (ids, logprobs) == whole[:2]
        assert set(reasons) <= {"length", "stop"}
    cut = engine()
    cut.cut_at = {len(PROMPT) + n for n in range(1, 6)}
    ids, logprobs, reasons = await collect(cut, 100)
    assert (ids, logprobs, reasons) == (*whole[:2], ["abort"] * 5 + ["stop"])


async def test_a_token_that_was_not_sampled_is_found_out() -> None:
    scripted = engine()
    with pytest.raises(EngineError, match="not what was sampled"):
        await scripted.generate([*PROMPT, *b"hullo"], Sampling(9), request_id="a/")
    with pytest.raises(EngineError, match="after the end of the turn"):
        await scripted.generate([*PROMPT, *TURN], Sampling(9), request_id="b/")
    await scripted.generate(PROMPT, Sampling(9), request_id="c/")
    with pytest.raises(EngineError, match="used twice"):
        await scripted.generate(PROMPT, Sampling(9), request_id="c/")


async def test_abort_ends_the_one_request_of_this_id_whatever_other_ids_begin_with() -> None:
    scripted = engine(chunk=1)
    scripted.hold_at = len(PROMPT) + 4
    ids = ["g1-1", "g1-10", "g1-1/2", "g1-"]
    tasks = {id: asyncio.create_task(scripted.generate(PROMPT, Sampling(99), request_id=id)) for id in ids}
    while len(scripted.held) < len(ids):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await scripted.abort("g1-1")
    assert (await tasks.pop("g1-1")).finish_reason == "abort"
    scripted.hold_at = None
    assert {(await task).finish_reason for task in tasks.values()} == {"length"}


async def test_pause_abort_failure_and_new_weights() -> None:
    scripted = engine(chunk=1)
    await scripted.pause()
    request = asyncio.create_task(scripted.generate(PROMPT, Sampling(99, stop_token_ids=STOPS), request_id="a/"))
    await asyncio.sleep(0.01)
    assert not request.done()
    await scripted.abort("unknown")
    await scripted.abort("a/")
    completion = await request
    assert (completion.segments, completion.finish_reason) == ((), "abort")
    await scripted.resume()
    scripted.hold_at = len(PROMPT) + 4
    request = asyncio.create_task(scripted.generate(PROMPT, Sampling(99, stop_token_ids=STOPS), request_id="b/"))
    await asyncio.sleep(0.02)
    assert scripted.held == {"b/"}
    assert scripted.unjournaled() == {"b/": 4}
    await scripted.update_weights(Weights(7, None, lambda: ()))
    scripted.hold_at = None
    completion = await request
    assert [(len(s), s.weight_version) for s in completion.segments] == [(4, 0), (len(TURN) - 4, 7)]
    assert scripted.unjournaled() == {}
    scripted.fail_next = 1
    with pytest.raises(EngineError, match="scripted failure"):
        await scripted.generate(PROMPT, Sampling(9), request_id="d/")


class Id(str):
    """Counts how often it is compared with another."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)


async def test_a_request_costs_no_more_the_more_there_were() -> None:
    scripted = engine()
    for number in range(200):
        await scripted.generate(PROMPT, Sampling(1), request_id=Id(f"{number}/"))
    assert Id.compared < 200
