"""SGLangServer keeps to the wire of the real server, in its good and in its bad habits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from gspo_agent.messages import user
from gspo_agent.testing import ByteChat
from gspo_agent.testing.scripted import scripted_logprob
from gspo_agent.testing.sglang_server import SGLangServer
from gspo_agent.testing.sglang_server.model import BLOCK

CHAT = ByteChat()
PROMPT = CHAT.open([user("a question that is longer than one block of the cache")], [])
TURN = CHAT.turn("an answer of some tokens, " * 8)
FREE = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


class Client:
    """The calls that the tests make, bare."""

    def __init__(self, server: SGLangServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def post(self, route: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.server.url + route, json=body) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if raw[:1] in (b"{", b"n") else raw

    async def get(self, route: str) -> tuple[int, Any]:
        async with self.session.get(self.server.url + route) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if raw[:1] == b"{" else raw

    async def generate(self, rid: str, token_ids: list[int] = PROMPT, new: int = 1000, **more: Any) -> tuple[int, Any]:
        sampling = {"max_new_tokens": new, "stop_token_ids": [CHAT.END], "sampling_seed": 3}
        body = {"rid": rid, "input_ids": token_ids, "return_logprob": True, "sampling_params": sampling, **more}
        return await self.post("/generate", **body)

    def start(self, rid: str, **more: Any) -> asyncio.Task[tuple[int, Any]]:
        return asyncio.create_task(self.generate(rid, **more))


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[tuple[SGLangServer, Client]]:
    async with SGLangServer(lambda prompt, seed: TURN, **options) as server, aiohttp.ClientSession() as session:
        yield server, Client(server, session)


def spans(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


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


async def test_an_update_in_a_pause_splits_the_versions_exactly_there(weights: str) -> None:
    async with scene() as (server, client):
        server.hold_after = 37
        task = client.start("a")
        await server.sampled(37)
        await client.post("/pause_generation", mode="in_place")
        waiting = client.start("b")
        await server.received("/generate", 2)
        status, reply = await client.post(
            "/update_weights_from_disk", model_path=weights, weight_version="7", flush_cache=False
        )
        assert (status, reply["success"]) == (200, True)
        assert (await client.get("/ready"))[0] == 503
        server.hold_after = None
        await client.post("/continue_generation")
        meta = (await task)[1]["meta_info"]
        assert meta["weight_versions"] == spans(("default", 0, 37), ("7", 37, len(TURN)))
        assert meta["weight_version"] == "7"
        assert (await waiting)[1]["meta_info"]["weight_versions"] == spans(("7", 0, len(TURN)))
        assert (await client.get("/model_info"))[1]["weight_version"] == server.weight_version == "7"


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
