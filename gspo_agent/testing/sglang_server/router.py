"""SGLangRouter: SGLang's router as far as it goes: it spreads requests and lists workers, and forwards nothing else."""

from __future__ import annotations

import uuid
import zlib
from types import TracebackType

import aiohttp
import orjson
from aiohttp import web

from gspo_agent.testing.sglang_server.reply import answer, failure
from gspo_agent.testing.sglang_server.site import Site

ROUTING_KEY = "X-SMG-Routing-Key"


class SGLangRouter:
    """/generate goes to one worker, the same for the same routing key; aborts, pauses and updates are not forwarded, so
    a client has to list the workers and call each.

    >>> async with SGLangRouter([server.url, other.url]) as router: ...
    """

    def __init__(self, urls: list[str], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.workers = {uuid.uuid4().hex: url for url in urls}
        """Id -> URL."""
        self._site = Site(host, port)
        self._turns = 0

    @property
    def url(self) -> str:
        return f"http://{self._site.host}:{self._site.port}"

    async def start(self) -> SGLangRouter:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        routes = {
            "POST|PUT /generate": self._generate,
            "GET /model_info": self._forward,
            "GET /server_info": self._forward,
            "GET /health": self._health,
            "GET /workers": self._list,
            "POST /workers": self._add,
            "DELETE /workers/{id}": self._remove,
        }
        try:
            await self._site.open(routes)
        except BaseException:
            await self._session.close()
            raise
        return self

    async def stop(self) -> None:
        try:
            if (runner := self._site.cut()) is not None:
                await runner.cleanup()
        finally:
            await self._session.close()

    async def __aenter__(self) -> SGLangRouter:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        urls = sorted(self.workers.values())
        if not urls:
            return failure("No available workers", 503)
        key = http.headers.get(ROUTING_KEY)
        self._turns += 1
        return await self._pass(http, urls[(zlib.crc32(key.encode()) if key else self._turns) % len(urls)])

    async def _forward(self, http: web.Request) -> web.StreamResponse:
        urls = sorted(self.workers.values())
        return await self._pass(http, urls[0]) if urls else failure("No available workers", 503)

    async def _pass(self, http: web.Request, url: str) -> web.StreamResponse:
        data = await http.read() if http.can_read_body else None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(http.method, url + http.path_qs, data=data) as reply:
                kind = reply.headers.get("Content-Type", "application/json")
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": kind})
                response.content_length = reply.content_length
                await response.prepare(http)
                async for part in reply.content.iter_any():
                    await response.write(part)
                return response
        except aiohttp.ClientError as problem:
            if response is not None and http.transport is not None:
                http.transport.close()
            return response or failure(f"Failed to send request to worker: {problem}", 503)

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.workers else 503)

    async def _list(self, http: web.Request) -> web.Response:
        workers = [
            {"id": worker, "url": url, "worker_type": "regular", "is_healthy": True}
            for worker, url in self.workers.items()
        ]
        return answer({"workers": workers, "total": len(workers)})

    async def _add(self, http: web.Request) -> web.Response:
        url = orjson.loads(await http.read())["url"]
        worker = next((known for known, at in self.workers.items() if at == url), uuid.uuid4().hex)
        self.workers[worker] = url
        return answer({"status": "accepted", "worker_id": worker, "url": url}, 202)

    async def _remove(self, http: web.Request) -> web.Response:
        if self.workers.pop(http.match_info["id"], None) is None:
            return failure(f"Worker {http.match_info['id']} not found", 404)
        return answer({"status": "accepted", "worker_id": http.match_info["id"]}, 202)
