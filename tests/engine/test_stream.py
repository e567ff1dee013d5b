from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gspo_agent.engine.base import Completion, Counting, Sampling, Weights
from gspo_agent.engine.publish import publish
from gspo_agent.engine.reply import WrongReply
from gspo_agent.engine.request import STREAM_INTERVAL, Asked
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.engine.stream import NoIncrement, Stream
from gspo_agent.errors import EngineError
from gspo_agent.testing.sglang_server import WRONG, SGLangServer
from tests.engine.test_sglang import (
    LOGPROBS,
    MARK,
    STOP,
    WHOLE,
    ask,
    is_beginning,
    logprobs,
    rids,
    running,
    tokens,
    versions,
    weights,
)

__all__ = ["weights"]  # a fixture


@asynccontextmanager
async def streaming(number: int = 1, **options: Any) -> AsyncIterator[tuple[SGLangEngine, list[SGLangServer]]]:
    async with running(number, {"incremental": True}, stream=True, **options) as (engine, servers):
        yield engine, servers


async def whole(engine: SGLangEngine, id: str = "r") -> list[Completion]:
    """Asks on until the turn is over, as an episode does."""
    parts: list[Completion] = []
    while not parts or parts[-1].finish_reason != "stop":
        prompt = [5, 6, MARK, *(token for part in parts for token in tokens(part))]
        sampling = Sampling(300, 1.0, (STOP,), 7)
        parts.append(await engine.generate(prompt, sampling, request_id=f"{id}-{len(parts)}/"))
    return parts


def is_whole(parts: list[Completion]) -> bool:
    """Whether nothing is lost, said twice, or another's."""
    return [token for part in parts for token in tokens(part)] == WHOLE and [
        value for part in parts for value in logprobs(part)
    ] == LOGPROBS


def sent(one: SGLangServer) -> list[bool]:
    return [bool(call.body.get("stream")) for call in one.requests if call.route == "/generate"]


async def arrived(engine: SGLangEngine, number: int) -> None:
    while sum(engine.unjournaled().values()) < number:  # noqa: ASYNC110 -- tokens that come tell nobody
        await asyncio.sleep(0.001)


async def test_what_is_streamed_is_what_a_whole_reply_would_have_said(weights: Callable[[int], Weights]) -> None:
    async with streaming() as (engine, servers):
        servers[0].hold_after = 40
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(40)
        await publish(weights(3), engine)
        servers[0].hold_after = None
        completion = await request
        assert (tokens(completion), logprobs(completion)) == (WHOLE, LOGPROBS)
        assert (completion.finish_reason, versions(completion)) == ("stop", [0, 3])
        assert [len(segment) for segment in completion.segments] == [40, 160]
        stats = engine.stats()
        assert (stats["tokens"], stats["versions_from_spans"], stats["rescued"]) == (200, 1, 0)
        assert sent(servers[0]) == [True]
        assert servers[0].requests[0].body["sampling_params"]["stream_interval"] == STREAM_INTERVAL


async def test_tokens_are_counted_as_they_come_or_all_that_may_come_where_nobody_tells() -> None:
    for stream, seen in ((True, 33), (False, 300)):
        async with running(options={"incremental": True, "chunk": 1}, stream=stream) as (engine, servers):
            assert isinstance(engine, Counting)
            servers[0].hold_after = 40
            request = asyncio.create_task(ask(engine))
            await arrived(engine, 33)
            await servers[0].sampled(40)
            await asyncio.sleep(0.02)
            assert engine.unjournaled() == {"r": seen}
            await engine.pause()
            later = asyncio.create_task(ask(engine, "later"))
            await asyncio.sleep(0.01)
            assert engine.unjournaled() == {"r": seen, "later": 0}
            servers[0].hold_after = None
            await engine.resume()
            await asyncio.gather(request, later)
            assert engine.unjournaled() == {}


async def test_only_a_server_that_sends_increments_is_asked_for_a_stream() -> None:
    async with running(stream=True) as (engine, servers):
        assert tokens(await ask(engine)) == WHOLE
        assert sent(servers[0]) == [False]


async def test_a_server_that_says_increments_and_sends_all_again_is_found_out() -> None:
    async with SGLangServer(None, chunk=4) as one:
        one.order("reply", route="/server_info", change=lambda info: info.update(incremental_streaming_output=True))
        engine = SGLangEngine([one.url], vocab_size=264, weight_version=0, stream=True, back_off=0.001)
        await engine.open()
        one.requests.clear()
        for n in range(2):
            assert len(tokens(await engine.generate([1, 2], Sampling(100), request_id=f"{n}"))) == 100
        assert sent(one) == [True, False, False]
        await engine.close()


async def test_the_connection_of_a_stream_serves_the_next_request() -> None:
    async with streaming(look_every=60.0) as (engine, servers):
        fault = servers[0].order("no end")  # [DONE] comes a little later, as from a server in another process
        asyncio.get_running_loop().call_later(0.05, fault.release)
        await ask(engine)
        assert engine._http is not None
        connector = engine._http.connector
        assert connector is not None
        assert sum(map(len, connector._conns.values())) == 1


# ---- faults


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "cut body", "after": 50},
        {"kind": "abort", "after": 50, "status": 503},
        {"kind": "abort", "after": 50, "status": 500},
    ],
    ids=lambda fault: fault["kind"],
)
@pytest.mark.parametrize("number", [1, 2])
async def test_a_stream_that_is_cut_goes_on_from_what_came(fault: dict[str, Any], number: int) -> None:
    async with streaming(number) as (engine, servers):
        for one in servers:
            one.order(**fault)
        parts = await whole(engine)
        assert is_whole(parts)
        assert 30 <= engine.stats()["rescued"] == sum(len(tokens(part)) for part in parts[:-1])
        assert {part.finish_reason for part in parts[:-1]} == {"abort"}
        assert engine.stats()["tokens"] == 200


async def test_what_a_server_had_sent_when_it_died_is_kept() -> None:
    async with streaming(2) as (engine, servers):
        for one in servers:
            one.hold_after = 50
        requests = [asyncio.create_task(whole(engine, f"{n}")) for n in range(4)]
        await arrived(engine, 4 * 36)
        servers[0].crash()
        servers[1].hold_after = None
        assert all(map(is_whole, await asyncio.gather(*requests)))
        assert engine.stats()["rescued"] >= 2 * 36


async def test_of_a_cut_stream_only_what_came_before_an_update_is_kept(weights: Callable[[int], Weights]) -> None:
    """Behind it, which weights a token has is not known before the end."""
    async with streaming() as (engine, servers):
        servers[0].order("cut body", after=120)
        servers[0].hold_after = 40
        request = asyncio.create_task(whole(engine))
        await arrived(engine, 36)
        await publish(weights(3), engine)
        servers[0].hold_after = None
        parts = await request
        assert is_whole(parts)
        assert [(versions(part), len(tokens(part))) for part in parts] == [([0], 36), ([3], 164)]


async def test_a_stream_of_unknown_weights_is_not_kept() -> None:
    async with streaming() as (engine, servers):

        def base(event: Any) -> None:
            event["meta_info"]["weight_version"] = "base"

        servers[0].order("reply", change=base)
        servers[0].order("cut body", after=50)
        parts = await whole(engine)
        assert (is_whole(parts), len(parts), engine.stats()["rescued"]) == (True, 1, 0)


@pytest.mark.parametrize("after", [0, 50])
async def test_an_event_that_is_said_twice_counts_once(after: int) -> None:
    async with streaming() as (engine, servers):
        servers[0].order("duplicate", after=after)
        for n in range(2):
            assert tokens(await ask(engine, f"{n}")) == WHOLE
        assert engine.stats()["retries"] == 0


async def test_a_stream_that_never_says_done_holds_nobody() -> None:
    async with streaming() as (engine, servers):
        fault = servers[0].order("no end")
        assert tokens(await asyncio.wait_for(ask(engine), 5)) == WHOLE
        fault.release()
        assert tokens(await ask(engine, "s")) == WHOLE


async def test_the_end_of_an_aborted_stream_that_comes_too_late_is_not_waited_for() -> None:
    async with streaming(abort_seconds=0.05) as (engine, servers):
        late = servers[0].order("late")
        servers[0].hold_after = 40
        request = asyncio.create_task(ask(engine))
        await arrived(engine, 36)
        await engine.abort("r")
        completion = await request
        assert (completion.finish_reason, is_beginning(completion), len(tokens(completion))) == ("abort", True, 36)
        late.release()
        servers[0].hold_after = None
        assert tokens(await ask(engine, "s")) == WHOLE
        assert engine.stats()["tokens"] == 236


async def test_an_aborted_stream_brings_what_was_sampled() -> None:
    async with streaming() as (engine, servers):
        servers[0].hold_after = 40
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(40)
        await engine.abort("r")
        await servers[0].received("/abort_request")
        servers[0].hold_after = None
        completion = await request
        assert (completion.finish_reason, is_beginning(completion)) == ("abort", True)
        assert len(tokens(completion)) >= 40


async def test_a_stream_that_ends_in_the_queue_has_its_tokens_once() -> None:
    async with streaming() as (engine, servers):
        servers[0].hold_after = 36
        request = asyncio.create_task(ask(engine))
        await arrived(engine, 36)
        servers[0].scheduler.max_running = 0
        servers[0].retract()
        await engine.abort("r")
        completion = await request
        assert (completion.finish_reason, is_beginning(completion), len(tokens(completion))) == ("abort", True, 36)


async def test_what_a_server_refuses_in_a_stream_is_not_asked_for_again() -> None:
    async with streaming() as (engine, servers):
        servers[0].order("abort", after=8, status=400, message="too silly")
        with pytest.raises(EngineError, match=r"request 'r': http.*: it ended the request: .*too silly"):
            await ask(engine)
        assert len(rids(servers[0])) == 1
        with pytest.raises(EngineError, match="which is not what was sampled"):
            await engine.generate([5, MARK, 9], Sampling(4), request_id="s")
        assert len(rids(servers[0])) == 2


@pytest.mark.parametrize("wrong", ["no logprobs", "a logprob less", "another id"])
async def test_a_stream_whose_lengths_and_ids_disagree_is_an_error(wrong: str) -> None:
    async with streaming() as (engine, servers):
        servers[0].order("reply", change=WRONG[wrong])
        with pytest.raises(EngineError, match=r"request 'r': http.*logprob"):
            await ask(engine)


@pytest.mark.parametrize("wrong", ["no finish reason", "another rid", "a wrong count", "no ids"])
async def test_a_stream_that_is_not_what_was_asked_for_is_tried_again(wrong: str) -> None:
    async with streaming() as (engine, servers):
        servers[0].order("reply", change=WRONG[wrong])
        assert tokens(await ask(engine)) == WHOLE
        assert (engine.stats()["retries"], engine.stats()["rescued"]) == (1, 0)


# ---- one event after the other


def event(first: int, last: int, count: int, finish: str | None = None) -> dict[str, Any]:
    ids = list(range(first, last))
    meta = {
        "id": "r",
        "finish_reason": finish and {"type": finish},
        "completion_tokens": count,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    return {"output_ids": ids, "meta_info": meta}


def stream() -> Stream:
    return Stream(Asked("r", Sampling(100), 100, "policy", 7), "7", {"7": 7})


def test_events_add_up_and_a_part_of_them_is_that_of_an_aborted_request() -> None:
    one = stream()
    assert one.rest() is None
    assert not one.take(event(0, 1, 1))
    assert not one.take(event(1, 17, 17))
    rest = one.rest()
    assert rest is not None
    assert (tokens(rest.completion), rest.completion.finish_reason) == (list(range(17)), "abort")
    assert one.take(event(17, 20, 20, "length"))
    assert tokens(one.reply().completion) == list(range(20))
    assert one.rest() is None


def test_nothing_behind_an_event_of_other_weights_is_certain() -> None:
    one = stream()
    one.take(event(0, 16, 16))
    other = event(16, 32, 32)
    other["meta_info"]["weight_version"] = "8"
    one.take(other)
    one.take(event(32, 48, 48))
    rest = one.rest()
    assert rest is not None
    assert tokens(rest.completion) == list(range(16))


def test_the_end_in_the_queue_has_all_logprobs_and_may_come_together_with_the_event_before_it() -> None:
    one = stream()
    one.take(event(0, 16, 16))
    last = event(16, 32, 32, "abort")
    last["output_ids"].append(31)
    last["meta_info"]["output_token_logprobs"] += event(0, 32, 32)["meta_info"]["output_token_logprobs"]
    assert one.take(last)
    assert tokens(one.reply().completion) == list(range(32))


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (event(32, 48, 48), WrongReply),  # one between is missing
        (event(0, 32, 32), NoIncrement),
        (event(16, 30, 32), WrongReply),
        ({"output_ids": [16], "meta_info": {**event(16, 17, 17)["meta_info"], "id": "s"}}, WrongReply),
        ({"output_ids": [16]}, WrongReply),
    ],
)
def test_an_event_that_does_not_go_on_makes_all_of_them_useless(second: Any, error: type[Exception]) -> None:
    one = stream()
    one.take(event(0, 16, 16))
    with pytest.raises(error):
        one.take(second)
    assert one.rest() is None
