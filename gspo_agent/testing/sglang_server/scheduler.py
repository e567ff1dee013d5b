"""The part of the server that computes: requests that wait and run, in steps; versions, aborts and retractions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gspo_agent.testing.scripted import scripted_logprob
from gspo_agent.testing.sglang_server.model import PrefixCache

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
WAITING = {"type": "abort", "message": "Abort in waiting queue"}
REPORT_EVERY = 50
"""Tokens between two reports of a request that does not stream; what is not reported is lost with its request."""


@dataclass(slots=True, eq=False)
class Request:
    """One /generate call as the scheduler sees it."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    return_logprob: bool = False
    stream: bool = False
    stream_interval: int = 1
    """New tokens of an event; the first event is sent at once."""
    namespace: str = ""
    """Prefixes are shared within one only."""
    adapter: str | None = None
    """The name of the one that samples."""
    end_at: tuple[int, dict[str, Any]] | None = None
    """(tokens, finish reason) at which it is ended by order."""
    tokens: Iterator[int] = field(default_factory=lambda: iter(()))
    """What is still to be sampled."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, tokens) at each change of it: up to there the tokens are of that version."""
    finish_reason: dict[str, Any] | None = None
    abort_sent: bool = False
    aborting: bool = False
    cached_tokens: int = 0
    num_retractions: int = 0
    version: str = ""
    """Of the weights when it ended."""
    gone: bool = False
    """Its client has closed the connection."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at every change; whoever waits clears it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.perf_counter)

    @property
    def queued(self) -> bool:
        """Whether it ended in the waiting queue: its reply has no prompt_tokens."""
        return self.finish_reason is not None and self.finish_reason.get("message") == WAITING["message"]

    @property
    def reported(self) -> int:
        """Tokens that have left the scheduler while it runs."""
        return len(self.output_ids) if self.stream else len(self.output_ids) // REPORT_EVERY * REPORT_EVERY

    def spans(self) -> list[dict[str, Any]]:
        """`weight_versions` as the server writes them: half open, without the empty ones after the first."""
        spans: list[dict[str, Any]] = []
        for version, end in [*self.changes, (self.version, len(self.output_ids))]:
            end = min(end, len(self.output_ids))
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and version == spans[-1]["version"]:
                spans[-1]["end"] = end
                continue
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans

    def finish(self, reason: dict[str, Any], version: str) -> None:
        self.finish_reason, self.version = reason, version
        self.news.set()
        self.ended.set()


class Scheduler:
    """Every change of a request happens between two awaits of `run`, or in one of the calls below."""

    def __init__(self, *, chunk: int, delay: float, max_running: int | None, cache_tokens: int, version: str) -> None:
        self.chunk, self.delay, self.version = chunk, delay, version
        self.max_running = math.inf if max_running is None else max_running
        self.hold_after: int | None = None
        self.cache = PrefixCache(cache_tokens)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.paused = False
        self.prefill_tokens = self.cached_tokens = 0
        self._work = asyncio.Event()
        self.stepped = asyncio.Condition()
        """Notified after every step."""

    @property
    def live(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def idle(self) -> bool:
        """Whether the cache may be flushed: in a pause, what waits holds none of it."""
        return not self.running and (self.paused or not self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._work.set()

    def abort(self, prefix: str) -> None:
        """What waits ends now; what runs ends with its next step, so not before a pause is over."""
        for request in [r for r in self.waiting if r.rid.startswith(prefix)]:
            self.waiting.remove(request)
            del request.output_ids[request.reported :], request.logprobs[request.reported :]
            request.finish(dict(WAITING), self.version)
        for request in self.running:
            request.aborting |= request.rid.startswith(prefix)

    def pause(self, *, retract: bool) -> None:
        self.paused = True
        if retract:
            self.retract()

    def resume(self) -> None:
        self.paused = False
        self._work.set()

    def retract(self) -> None:
        """Everything that runs waits again, and is computed anew when its turn comes."""
        for request in self.running:
            request.num_retractions += 1
        self.waiting, self.running = [*self.running, *self.waiting], []
        self._work.set()

    def change_version(self, version: str | None) -> None:
        if version is None or version == self.version:
            return
        for request in self.live:
            if request.output_ids:
                request.changes.append((self.version, len(request.output_ids)))
        self.version = version

    async def run(self) -> None:
        while True:
            while self.paused or not self.live:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.delay)
            if not self.paused and not self._step():
                await asyncio.sleep(0.001)
            async with self.stepped:
                self.stepped.notify_all()

    def _step(self) -> bool:
        """Whether anything moved."""
        while self.waiting and len(self.running) < self.max_running:
            self._prefill(self.waiting.pop(0))
        moved = False
        for request in self.running:
            moved |= self._sample(request)
            if request.finish_reason is not None:
                self.cache.add([*request.prompt, *request.output_ids], request.namespace)
        self.running = [request for request in self.running if request.finish_reason is None]
        return moved

    def _prefill(self, request: Request) -> None:
        token_ids = [*request.prompt, *request.output_ids]
        known = self.cache.known(token_ids, request.namespace)
        if not request.num_retractions:
            request.cached_tokens = known
        self.cached_tokens += known
        self.prefill_tokens += len(token_ids) - known
        self.cache.add(token_ids, request.namespace)
        self.running.append(request)

    def _sample(self, request: Request) -> bool:
        """One step of one request; an aborted one samples one token more, as in a batch that is under way."""
        done = len(request.output_ids)
        last, reason = request.end_at or (math.inf, None)
        limit = min(last, math.inf if self.hold_after is None else self.hold_after)
        for _ in range(int(min(1 if request.aborting else self.chunk, max(limit - done, 0)))):
            token = next(request.tokens, None)
            if token is None:
                request.finish({"type": "length", "length": len(request.output_ids)}, self.version)
                break
            position = len(request.prompt) + len(request.output_ids)
            request.output_ids.append(token)
            request.logprobs.append(scripted_logprob(request.seed, position, token))
            if request.aborting:
                break
            if token in request.stop_token_ids:
                request.finish({"type": "stop", "matched": token}, self.version)
            elif len(request.output_ids) >= request.max_new_tokens:
                request.finish({"type": "length", "length": request.max_new_tokens}, self.version)
            if request.finish_reason is not None:
                break
        if request.finish_reason is None:
            if request.aborting:
                request.finish(dict(ABORTED), self.version)
            elif reason is not None and len(request.output_ids) >= last:
                request.finish(reason, self.version)
        request.news.set()
        return len(request.output_ids) > done or request.finish_reason is not None
