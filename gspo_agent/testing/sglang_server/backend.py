"""What the routes of one life of the server share; a restart makes a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gspo_agent.testing.sglang_server.gate import Gate
from gspo_agent.testing.sglang_server.model import Model
from gspo_agent.testing.sglang_server.scheduler import Request, Scheduler


class Backend:
    """The scheduler, the gate before it and what is known of every request between its arrival and its reply."""

    def __init__(
        self, model: Model, scheduler: Scheduler, *, model_path: str, context_tokens: int, crash: Callable[[], None]
    ) -> None:
        self.model, self.scheduler, self.gate = model, scheduler, Gate()
        self.model_path, self.context_tokens, self.crash = model_path, context_tokens, crash
        self.weight_version = scheduler.version
        """As /model_info gives it: after an update that failed half-way it is not the scheduler's."""
        self.requests: dict[str, Request] = {}
        self.released: set[str] = set()
        """Parts of the memory that are released: "weights", "kv_cache"."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self, rid: str) -> None:
        """Ignored where no request has exactly this id; else every one in the scheduler that begins with it ends.

        One that has not reached the scheduler yet is not ended, now or by a second abort.
        """
        request = self.requests.get(rid)
        if request is not None and not request.abort_sent:
            request.abort_sent = True
            self.scheduler.abort(rid)

    def abort_all(self) -> None:
        self.scheduler.abort("")
