"""What is ordered from SGLangServer happens, as often as ordered, and to nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from gspo_agent.testing.sglang_server import WRONG
from tests.testing.wire import FREE, PROMPT, QUEUED, TURN, scene, spans


async def test_a_request_is_aborted_after_the_tokens_that_were_ordered() -> None:
    async with scene() as (server, client):
        fault = server.order("abort", rid="g1-", after=13, times=2, skip=1)
        replies = [(await client.generate(rid))[1] for rid in ("g1-0", "g2-0", "g1-1", "g1-2", "g1-3")]
        assert [len(reply["output_ids"]) for reply in replies] == [len(TURN), len(TURN), 13, 13, len(TURN)]
        meta = replies[2]["meta_info"]
        assert (meta["finish_reason"], meta["prompt_tokens"], fault.struck) == (FREE, len(PROMPT), 2)
        assert (len(meta["output_token_logprobs"]), meta["weight_versions"]) == (13, spans(("default", 0, 13)))


@pytest.mark.parametrize("after", [0, 9])
async def test_an_abort_in_the_queue_is_as_the_server_writes_it(after: int) -> None:
    async with scene() as (server, client):
        server.order("abort in queue", after=after, times=2)
        status, reply = await client.generate("a")
        meta = reply["meta_info"]
        assert (status, reply["output_ids"], meta["finish_reason"]) == (200, TURN[:after], QUEUED)
        assert "prompt_tokens" not in meta
        assert len(meta["output_token_logprobs"]) == after
        server.order("reply", change=WRONG["no logprobs"])
        assert "output_token_logprobs" not in (await client.generate("b"))[1]["meta_info"]


async def test_older_and_failing_aborts() -> None:
    async with scene() as (server, client):
        server.order("abort before prefill")
        reply = (await client.generate("a"))[1]
        assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["message"]) == ([], "Abort before prefill")
        server.order("abort", status=400, message="no")
        assert await client.generate("b") == (400, {"error": {"message": "no"}})
        server.order("abort", status=503, message="no", after=5)
        status, reply = await client.generate("c")
        assert (status, reply["message"], reply["code"]) == (503, "no", 503)


async def test_statuses_strike_any_route_and_nothing_is_done() -> None:
    async with scene() as (server, client):
        server.order("status", status=429, times=2)
        server.order("status", route="/update_weight_version", message="refused", status=400)
        assert [(await client.generate(f"{n}/"))[0] for n in range(3)] == [429, 429, 200]
        assert (await client.post("/update_weight_version", new_version="7"))[0] == 400
        assert server.weight_version == "default"


async def test_an_update_may_be_answered_and_not_done(weights: str) -> None:
    async with scene() as (server, client):
        server.order("unchanged", route="/update_weights_from_disk")
        assert (await client.post("/update_weights_from_disk", model_path=weights, weight_version="7"))[1]["success"]
        server.order("unchanged", route="/update_weight_version")
        assert (await client.post("/update_weight_version", new_version="7"))[1]["success"]
        assert (await client.get("/model_info"))[1]["weight_version"] == "default"


@pytest.mark.parametrize("kind", ["stall", "late"])
async def test_an_answer_may_wait_for_its_release(kind: Any) -> None:
    async with scene() as (server, client):
        fault = server.order(kind)
        task = client.start("a")
        await server.received("/generate")
        assert (await client.generate("b"))[1]["output_ids"] == TURN
        assert not task.done()
        fault.release()
        assert (await task)[1]["output_ids"] == TURN


async def test_connections_are_cut_before_and_in_the_middle_of_an_answer() -> None:
    async with scene() as (server, client):
        server.order("cut")
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await client.generate("a")
        server.order("cut body")
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.generate("b")
        server.order("cut body", after=20)
        body = {"rid": "c", "input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 50}}
        raw = b""
        with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012
            async with client.session.post(f"{server.url}/generate", json=body) as response:
                async for part in response.content.iter_any():
                    raw += part
        *whole, half = raw.split(b"\n\n")
        assert len(orjson.loads(whole[-1].removeprefix(b"data: "))["output_ids"]) < 20
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(half.removeprefix(b"data: "))
        assert (await client.generate("d"))[1]["output_ids"] == TURN


async def test_a_crash_is_over_with_a_restart() -> None:
    async with scene() as (server, client):
        server.order("crash", route="/flush_cache")
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await client.post("/flush_cache")
        assert not server.up
        await server.restart()
        assert (await client.generate("a"))[0] == 200


async def test_an_answer_may_come_twice() -> None:
    async with scene() as (server, client):
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        fault = server.order("duplicate")
        body = orjson.dumps({"rid": "a", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}})
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        bodies = []
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            bodies.append(await reader.readexactly(size))
            fault.release()
        assert bodies[0] == bodies[1]
        writer.close()
        await writer.wait_closed()
        server.order("duplicate")
        _, raw = await client.generate("b", stream=True)
        *_, last, again, end = raw.strip().split(b"\n\n")
        assert (last, end) == (again, b"data: [DONE]")


async def test_replies_may_be_wrong_in_every_listed_way() -> None:
    async with scene() as (server, client):
        usual = set((await client.generate("usual"))[1]["meta_info"])
        for name, change in WRONG.items():
            server.order("reply", change=change)
            status, reply = await client.generate(name)
            meta, ids = reply["meta_info"], reply.get("output_ids")
            logprobs = meta.get("output_token_logprobs")
            right = (
                ids == TURN
                and logprobs is not None
                and [entry[1] for entry in logprobs] == TURN
                and meta["completion_tokens"] == len(TURN)
                and meta.get("weight_versions") == spans(("default", 0, len(TURN)))
                and meta["id"] == name
                and set(meta) == usual
            )
            assert (status, right) == (200, False), name
        assert (await client.generate("right"))[1]["output_ids"] == TURN
