"""SGLangServer keeps to the wire of the real server, in its good and in its bad habits."""

from __future__ import annotations

import asyncio
import sys
from itertools import chain

import aiohttp
import orjson
import pytest

from gspo_agent.testing.scripted import scripted_logprob
from gspo_agent.testing.sglang_server.model import BLOCK
from tests.testing.wire import CHAT, FREE, PROMPT, QUEUED, TURN, scene, spans


async def test_a_reply_has_ids_logprobs_and_spans_of_one_length() -> None:
    async with scene() as (_, client):
        status, reply = await client.generate("a")
    meta, start = reply["meta_info"], len(PROMPT)
    assert (status, reply["output_ids"], meta["id"]) == (200, TURN, "a")
    assert meta["finish_reason"] == {"type": "stop", "matched": CHAT.END}
    assert meta["output_token_logprobs"] == [
        [scripted_logprob(3, start + n, token), token, None] for n, token in enumerate(TURN)
    ]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (start, len(TURN))
    assert meta["weight_versions"] == spans(("default", 0, len(TURN)))


async def test_bounded_requests_give_the_same_turn_and_meet_their_prefix() -> None:
    async with scene() as (_, client):
        ids: list[int] = []
        asked, cached = [], []
        while CHAT.END not in ids:
            _, reply = await client.generate(f"r{len(ids)}/", [*PROMPT, *ids], new=20)
            asked.append(len(PROMPT) + len(ids))
            ids += reply["output_ids"]
            cached.append(reply["meta_info"]["cached_tokens"])
        assert ids == TURN
        assert cached == [0, *(min(tokens // BLOCK * BLOCK, tokens - 1) for tokens in asked[1:])]
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"
        status, refused = await client.generate("lost", [*PROMPT, *ids[:4], *ids[5:9]])
        assert (status, "was begun with" in refused["error"]["message"]) == (400, True)


async def test_an_abort_ends_what_begins_with_the_id_of_a_live_request_and_nothing_else() -> None:
    async with scene() as (server, client):
        server.hold_after = 30
        tasks = {rid: client.start(rid) for rid in ("g1-1", "g1-10", "g1-2")}
        await server.sampled(30, requests=3)
        assert await client.post("/abort_request", rid="g1-") == (200, b"")
        assert await client.post("/abort_request", rid="g1-10") == (200, b"")
        _, ten = await tasks["g1-10"]
        assert not tasks["g1-1"].done()
        assert not tasks["g1-2"].done()
        await client.post("/abort_request", rid="g1-1")
        await client.post("/abort_request", rid="g1-2")
        for reply in (ten, (await tasks["g1-1"])[1], (await tasks["g1-2"])[1]):
            assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == (TURN[:30], FREE)
        server.hold_after = 5
        pair = [client.start("h1"), client.start("h1-1")]
        await server.sampled(5, requests=2)
        await client.post("/abort_request", rid="h1")
        assert [(await task)[1]["output_ids"] for task in pair] == [TURN[:5], TURN[:5]]


async def test_a_token_outside_the_vocabulary_takes_everything_down_until_a_restart(weights: str) -> None:
    async with scene() as (server, client):
        await client.post("/update_weights_from_disk", model_path=weights, weight_version="7")
        server.hold_after = 5
        innocent = client.start("innocent")
        await server.sampled(5)
        with pytest.raises(aiohttp.ClientError):
            await client.generate("guilty", [*PROMPT, 264])
        with pytest.raises(aiohttp.ClientError):
            await innocent
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/health")
        await server.restart()
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/model_info"))[1]["weight_version"] == "default"
        assert (await client.generate("guilty"))[1]["output_ids"] == TURN


async def test_an_aborted_request_may_end_with_the_stop_token() -> None:
    async with scene() as (server, client):
        server.hold_after = len(TURN) - 1
        task = client.start("a")
        await server.sampled(len(TURN) - 1)
        await client.post("/pause_generation", mode="in_place")
        await client.post("/abort_request", rid="a")
        server.hold_after = None
        await client.post("/continue_generation")
        reply = (await task)[1]
        assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == (TURN, FREE)


async def test_an_abort_in_the_queue_has_no_prompt_tokens_and_only_the_tokens_that_were_reported() -> None:
    async with scene(max_running=1) as (server, client):
        server.hold_after = 60
        first, second, third = (client.start(rid) for rid in ("first", "second", "second-1"))
        await server.sampled(60)
        await server.received("/generate", 3)
        await client.post("/abort_request", rid="second")
        empty = (await second)[1]
        assert (await third)[1]["meta_info"]["finish_reason"] == QUEUED
        assert (empty["output_ids"], empty["meta_info"]["finish_reason"]) == ([], QUEUED)
        assert "prompt_tokens" not in empty["meta_info"]
        assert empty["meta_info"]["output_token_logprobs"] == []
        assert empty["meta_info"]["weight_versions"] == spans(("default", 0, 0))
        server.scheduler.max_running = 0
        server.retract()
        await client.post("/abort_request", rid="first")
        partial = (await first)[1]
        assert (partial["output_ids"], partial["meta_info"]["completion_tokens"]) == (TURN[:50], 50)
        assert len(partial["meta_info"]["output_token_logprobs"]) == 50


async def test_a_full_retraction_costs_nothing_but_a_count() -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        task = client.start("a")
        await server.sampled(20)
        server.retract()
        server.hold_after = None
        reply = (await task)[1]
        meta = reply["meta_info"]
        assert (reply["output_ids"], meta["num_retractions"], meta["cached_tokens"]) == (TURN, 1, 0)


async def test_a_stream_is_cumulative_or_in_increments_and_tells_versions_at_its_end() -> None:
    for incremental in (False, True):
        async with scene(incremental=incremental) as (_, client):
            status, raw = await client.generate("s", stream=True)
            *events, end = [line.removeprefix(b"data: ") for line in raw.strip().split(b"\n\n")]
            replies = [orjson.loads(event) for event in events]
            assert (status, end) == (200, b"[DONE]")
            assert len(replies) > 1
            parts = [reply["output_ids"] for reply in replies]
            assert (list(chain(*parts)) if incremental else parts[-1]) == TURN
            assert all(
                len(part) == len(r["meta_info"]["output_token_logprobs"])
                for part, r in zip(parts, replies, strict=True)
            )
            assert ["weight_versions" in reply["meta_info"] for reply in replies] == [False] * (len(parts) - 1) + [True]
            assert [reply["meta_info"]["finish_reason"] is None for reply in replies][-2:] == [True, False]


async def test_what_ends_in_the_queue_repeats_its_last_token_in_a_stream_of_increments() -> None:
    async with scene(incremental=True) as (server, client):
        server.hold_after = 20
        task = client.start("s", stream=True)
        await server.sampled(20)
        server.scheduler.max_running = 0
        server.retract()
        await client.post("/abort_request", rid="s")
        *events, _ = [line.removeprefix(b"data: ") for line in (await task)[1].strip().split(b"\n\n")]
        parts = [orjson.loads(event)["output_ids"] for event in events]
        assert (list(chain(*parts[:-1])), parts[-1]) == (TURN[:20], TURN[19:20])


async def test_requests_that_cannot_be_served_are_refused_as_the_server_refuses_them() -> None:
    async with scene(context_tokens=100) as (server, client):
        server.hold_after = 5
        task = client.start("a", new=10)
        await server.sampled(5)
        for problem, body in {
            "Duplicate request ID": {"rid": "a"},
            "longer than the model's context": {"rid": "b", "token_ids": [1] * 100},
            "exceeds the model's maximum context": {"rid": "c", "new": 60},
            "is empty": {"rid": "d", "token_ids": []},
            "no tokenizer": {"rid": "e", "text": "x", "token_ids": None},
            "at least 0": {"rid": "f", "new": -1},
        }.items():
            status, reply = await client.generate(**body)
            assert (status, problem in reply["error"]["message"]) == (400, True), (problem, reply)
        server.hold_after = None
        assert (await task)[1]["output_ids"] == TURN[:10]


async def test_a_closed_connection_ends_its_request() -> None:
    async with scene() as (server, client):
        server.hold_after = 5
        task = client.start("a")
        await server.sampled(5)
        task.cancel()
        while server.scheduler.live:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        server.hold_after = None
        assert (await client.generate("a"))[1]["output_ids"] == TURN


async def test_health_fails_in_a_pause_and_loads_count_requests() -> None:
    async with scene(health_timeout=0.01, max_running=1) as (server, client):
        assert (await client.get("/health_generate"))[0] == 200
        server.hold_after = 5
        tasks = [client.start(f"{n}/") for n in range(3)]
        await server.sampled(5)
        [load] = (await client.get("/v1/loads?include=core"))[1]["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 2)
        await client.post("/pause_generation", mode="in_place")
        assert (await client.get("/health"))[0] == 503
        server.hold_after = None
        await client.post("/continue_generation")
        await asyncio.gather(*tasks)
        assert (await client.get("/server_info"))[1]["version"] == "0.5.23"


async def test_drawn_ids_are_in_the_vocabulary_and_go_on_after_a_cut() -> None:
    async with scene(answer=None, vocab_size=50) as (_, client):
        whole = (await client.generate("a", [1, 2], new=40))[1]["output_ids"]
        part = (await client.generate("b", [1, 2, *whole[:13]], new=27))[1]["output_ids"]
        assert (max(whole) < 50, len(set(whole)) > 10, [*whole[:13], *part]) == (True, True, whole)


async def test_it_runs_as_a_process_of_its_own() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gspo_agent.testing.sglang_server", "--vocab-size", "50", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/model_info") as response:
        assert (await response.json())["weight_version"] == "default"
    process.terminate()
    assert await process.wait() == 0
