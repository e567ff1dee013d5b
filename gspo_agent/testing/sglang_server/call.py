"""One call of a route, as the routes see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gspo_agent.testing.sglang_server.faults import Fault


@dataclass(frozen=True, slots=True)
class Call:
    http: web.Request
    body: Mapping[str, Any]
    """The JSON, {} where there is none."""
    faults: list[Fault]
    """That strike this call."""

    async def cut(self) -> None:
        """Closes the connection behind what was written; does not return."""
        if self.http.transport is not None:
            self.http.transport.close()
        await asyncio.Event().wait()


Handler = Callable[[Call], Awaitable[web.StreamResponse]]
Routes = dict[str, Handler]
"""By methods and path: "POST /generate", "GET|POST /flush_cache"."""
