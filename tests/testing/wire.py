"""A bare client of SGLangServer, and what its scripted model says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from gspo_agent.messages import user
from gspo_agent.testing import ByteChat
from gspo_agent.testing.scripted import Answer
from gspo_agent.testing.sglang_server import SGLangServer

CHAT = ByteChat()
PROMPT = CHAT.open([user("a question that is longer than one block of the cache")], [])
TURN = CHAT.turn("an answer of some tokens, " * 8)
FREE = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


def weights_name(server: SGLangServer) -> str:
    """What it calls its weights, without the mark of the engine that brought them."""
    return re.sub("@[0-9a-f]{8}", "", server.weight_version)


class Client:
    """The calls that the tests make, bare."""

    def __init__(self, server: SGLangServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def post(self, route: str, to: str | None = None, **body: Any) -> tuple[int, Any]:
        async with self.session.post((to or self.server.url) + route, json=body) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if raw[:1] in (b"{", b"n") else raw

    async def get(self, route: str, to: str | None = None) -> tuple[int, Any]:
        async with self.session.get((to or self.server.url) + route) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if raw[:1] == b"{" else raw

    async def generate(self, rid: str, token_ids: list[int] = PROMPT, new: int = 1000, **more: Any) -> tuple[int, Any]:
        sampling = {"max_new_tokens": new, "stop_token_ids": [CHAT.END], "sampling_seed": 3}
        body = {"rid": rid, "input_ids": token_ids, "return_logprob": True, "sampling_params": sampling, **more}
        return await self.post("/generate", **body)

    def start(self, rid: str, **more: Any) -> asyncio.Task[tuple[int, Any]]:
        """Its task; the request is under way when `server.received` or `server.sampled` says so."""
        return asyncio.create_task(self.generate(rid, **more))


@asynccontextmanager
async def scene(
    answer: Answer | None = lambda prompt, seed: TURN, **options: Any
) -> AsyncIterator[tuple[SGLangServer, Client]]:
    async with SGLangServer(answer, **options) as server, aiohttp.ClientSession() as session:
        yield server, Client(server, session)


def spans(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]
