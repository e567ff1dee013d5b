"""SGLang's router: who is behind it. It forwards requests and nothing else, so all other calls go to each server."""

from __future__ import annotations

from typing import Any

import aiohttp

from gspo_agent.engine.worker import Refused, Unavailable, Unreachable, Worker


class Router:
    """
    >>> await Router("http://router:30000", http).workers()
    {'http://a:30000': '4f1c', 'http://b:30000': '9a07'}
    """

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self._http = url, http

    async def workers(self) -> dict[str, str]:
        """Address -> id of those that it sends requests to. Raises Unavailable; Refused where it is no router."""
        answer = await Worker(self.url, self._http).get("/workers")
        try:
            return {str(worker["url"]).rstrip("/"): str(worker.get("id", "")) for worker in answer["workers"]}
        except (KeyError, TypeError, AttributeError):
            raise Refused(f"{self.url}/workers lists no workers: {str(answer)[:200]}") from None

    async def put_in(self, worker: Worker) -> None:
        """From now on it sends requests there; nothing is asked of it where it does already."""
        known = await self.workers()
        if worker.url not in known:
            await self._tell("POST", "/workers", {"url": worker.url})

    async def take_out(self, worker: Worker) -> None:
        known = await self.workers()
        if worker.url in known:
            await self._tell("DELETE", f"/workers/{known[worker.url]}")

    async def _tell(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        timeout = aiohttp.ClientTimeout(10)
        try:
            async with self._http.request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from None
        if response.status >= 400:
            raise Unavailable(f"{method} {self.url}{path} answered {response.status}: {text[:200]}")
