"""SGLangRouter forwards what the real one forwards."""

from __future__ import annotations

import aiohttp
import pytest

from gspo_agent.testing.sglang_server import SGLangRouter
from gspo_agent.testing.sglang_server.router import ROUTING_KEY
from tests.testing.wire import PROMPT, TURN, scene


async def test_a_router_spreads_requests_and_lists_workers_and_forwards_no_abort() -> None:
    async with scene() as (one, client), scene() as (two, _), SGLangRouter([one.url]) as router:
        assert (await client.post("/workers", to=router.url, url=two.url))[0] == 202
        workers = (await client.get("/workers", to=router.url))[1]["workers"]
        assert [worker["url"] for worker in workers] == [one.url, two.url]
        for n in range(4):
            assert (await client.generate(f"{n}/", to=router.url))[1]["output_ids"] == TURN
        assert [len(one.requests), len(two.requests)] == [2, 2]
        assert (await client.post("/abort_request", to=router.url, rid="0/"))[0] == 404
        await two.stop()
        statuses = {(await client.generate(f"x{n}", to=router.url))[0] for n in range(2)}
        assert statuses == {200, 503}
        async with client.session.delete(f"{router.url}/workers/{workers[1]['id']}") as response:
            assert response.status == 202
        assert (await client.generate("y", to=router.url))[0] == 200


async def test_a_routing_key_keeps_its_worker() -> None:
    async with scene() as (one, client), scene() as (two, _), SGLangRouter([one.url, two.url]) as router:
        for _ in range(4):
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
            async with client.session.post(f"{router.url}/generate", json=body, headers={ROUTING_KEY: "e1"}) as reply:
                assert reply.status == 200
        assert sorted([len(one.requests), len(two.requests)]) == [0, 4]


async def test_a_worker_that_dies_in_the_middle_cuts_the_answer_of_the_router() -> None:
    async with scene() as (server, client), SGLangRouter([server.url]) as router:
        server.order("cut body")
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.generate("a", to=router.url)
        server.order("cut")
        assert (await client.generate("b", to=router.url))[0] == 503
