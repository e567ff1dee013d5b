"""SGLangServer: SGLang's wire without a model, deterministic, with faults on order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from gspo_agent.testing.scripted import Answer
from gspo_agent.testing.sglang_server.adapters import Adapters
from gspo_agent.testing.sglang_server.backend import Backend
from gspo_agent.testing.sglang_server.call import Call, Handler, Routes
from gspo_agent.testing.sglang_server.control import Control
from gspo_agent.testing.sglang_server.faults import Fault, Kind
from gspo_agent.testing.sglang_server.generation import Generation
from gspo_agent.testing.sglang_server.info import Info
from gspo_agent.testing.sglang_server.model import Model
from gspo_agent.testing.sglang_server.reply import answer, failure, invalid, refusal
from gspo_agent.testing.sglang_server.scheduler import Scheduler
from gspo_agent.testing.sglang_server.site import Site


class Received(NamedTuple):
    """One call that came in."""

    route: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class SGLangServer:
    """Speaks as SGLang 0.5.23 does, on a port of its own, on the event loop that started it.

    Token ids and logprobs depend on (prompt, seed) alone, as in ScriptedEngine; there is no tokenizer, as with
    `--skip-tokenizer-init`. What the real one does badly it does as well: an id outside the vocabulary takes it down,
    an abort of an id that is not live is ignored, one that comes before the request has passed a pause is lost.

    >>> async with SGLangServer(lambda prompt, seed: chat.turn("hello")) as server:
    ...     server.order("abort", after=3)
    ...     engine = SGLangEngine([server.url], ...)
    """

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        turn_mark: int = 258,
        vocab_size: int = 264,
        context_tokens: int = 1 << 20,
        version: str = "0.5.23",
        weight_version: str = "default",
        model_path: str = "scripted",
        chunk: int = 16,
        delay: float = 0.0,
        max_running: int | None = None,
        cache_tokens: int = 1 << 20,
        incremental: bool = False,
        ranks: int = 1,
        lora: bool = False,
        health_timeout: float = 20.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """
        Args:
            answer: None draws ids by a hash of (seed, position, id before).
            turn_mark: The token after which a turn begins; ByteChat.ASSISTANT.
            version: What /server_info says.
            chunk: Tokens per step.
            delay: Seconds per step, whatever the number of requests in it.
            max_running: More requests than this wait in the queue.
            incremental: As `--incremental-streaming-output`: events hold what is new, not all there is.
            ranks: Tensor-parallel ranks.
            lora: As `--enable-lora`.
            health_timeout: Seconds after which /health answers 503 while nothing can be computed.
            port: 0 takes a free one and keeps it over restarts.
        """
        self._site = Site(host, port)
        self.requests: list[Received] = []
        """Every call of a route, in the order in which they came."""
        self.faults: list[Fault] = []
        """All that meet a call strike it."""
        args: dict[str, Any] = {
            "tp_size": ranks,
            "dp_size": 1,
            "skip_tokenizer_init": True,
            "tokenizer_worker_num": 1,
            "incremental_streaming_output": incremental,
            "enable_lora": lora or None,
            "enable_memory_saver": True,
            "weight_version": weight_version,
        }

        def life() -> tuple[Backend, Control, Routes]:
            scheduler = Scheduler(
                chunk=chunk, delay=delay, max_running=max_running, cache_tokens=cache_tokens, version=weight_version
            )
            backend = Backend(
                Model(answer, turn_mark, vocab_size),
                scheduler,
                model_path=model_path,
                context_tokens=context_tokens,
                crash=self.crash,
            )
            control, self.adapters = Control(backend, ranks=ranks), Adapters(backend, enabled=lora)
            info = Info(backend, version=version, health_timeout=health_timeout, args=args)
            generation = Generation(backend, self.adapters, incremental=incremental)
            routes = generation.routes() | control.routes() | self.adapters.routes() | info.routes()
            return backend, control, routes | {"* /{rest:.*}": self._no_route}

        self._life = life
        self._backend, self.control, self._routes = life()
        self._closing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{self._site.host}:{self._site.port}"

    @property
    def up(self) -> bool:
        return self._site.up

    @property
    def weight_version(self) -> str:
        """As /model_info gives it."""
        return self._backend.weight_version

    @property
    def scheduler(self) -> Scheduler:
        return self._backend.scheduler

    @property
    def hold_after(self) -> int | None:
        """Tokens of a request after which it stands still, until this is None again."""
        return self.scheduler.hold_after

    @hold_after.setter
    def hold_after(self, tokens: int | None) -> None:
        self.scheduler.hold_after = tokens

    def order(self, kind: Kind, **options: Any) -> Fault:
        """Orders a fault; see `faults.Kind` for the kinds and `faults.Fault` for the options."""
        fault = Fault(kind, **options)
        self.faults.append(fault)
        return fault

    def retract(self) -> None:
        """Everything that runs goes back to the queue, as when the memory for keys and values is full."""
        self.scheduler.retract()

    async def sampled(self, tokens: int, rid: str = "", *, requests: int = 1) -> None:
        """Waits until so many live requests whose id begins with `rid` have at least so many tokens each."""

        def there() -> bool:
            live = self.scheduler.live
            return sum(r.rid.startswith(rid) and len(r.output_ids) >= tokens for r in live) >= requests

        async with self.scheduler.stepped:
            await self.scheduler.stepped.wait_for(there)

    async def received(self, route: str, count: int = 1) -> None:
        """Waits until a route was called so often."""
        while sum(call.route == route for call in self.requests) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def start(self) -> SGLangServer:
        await self._site.open({line: partial(self._answer, handler) for line, handler in self._routes.items()})
        self._backend.spawn(self.scheduler.run())
        return self

    def crash(self) -> None:
        """Goes down at once, every connection cut wherever it was; `restart` brings it back."""
        if (runner := self._site.cut()) is not None:
            self._closing = asyncio.create_task(self._close(runner, self._backend))

    @staticmethod
    async def _close(runner: web.AppRunner, backend: Backend) -> None:
        await backend.stop()
        await runner.cleanup()

    async def stop(self) -> None:
        """As `crash`; returns when the port is free."""
        self.crash()
        if self._closing is not None:
            await self._closing

    async def restart(self) -> None:
        """Comes back on the same port with the weights, and the version, that it was started with, and no cache."""
        await self.stop()
        self._backend, self.control, self._routes = self._life()
        await self.start()

    async def __aenter__(self) -> SGLangServer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _answer(self, handler: Handler, http: web.Request) -> web.StreamResponse:
        """Records a call and carries out the faults that any route can have."""
        raw = await http.read()
        try:
            body = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError as problem:
            return invalid(f"invalid JSON: {problem}")
        if handler != self._no_route:
            self.requests.append(Received(http.path, body, http.headers.copy()))
        faults = [fault for fault in self.faults if fault.meets(http.path, str(body.get("rid") or ""))]
        call = Call(http, body, faults)
        for fault in faults:
            if fault.kind == "stall":
                await fault.released()
            elif fault.kind == "cut":
                await call.cut()
            elif fault.kind == "crash":
                self.crash()
                await call.cut()
            elif fault.kind == "status":
                status = fault.status or 500
                return refusal(fault.message) if status == 400 else failure(fault.message, status)
        try:
            response = await handler(call)
        except KeyError as missing:
            return invalid(f"missing: {missing}")
        return await self._spoil(call, response) if isinstance(response, web.Response) else response

    async def _no_route(self, call: Call) -> web.Response:
        if any(line.endswith(f" {call.http.path}") for line in self._routes):
            return answer({"detail": "Method Not Allowed"}, 405)
        return answer({"detail": "Not Found"}, 404)

    async def _spoil(self, call: Call, response: web.Response) -> web.StreamResponse:
        """The faults of an answer that is there as a whole."""
        for fault in call.faults:
            if fault.kind == "reply" and response.status == 200:
                content = orjson.loads(response.body or b"null")  # type: ignore[arg-type]
                fault.change(content)
                response.body = orjson.dumps(content)
        for fault in call.faults:
            body = response.body if isinstance(response.body, bytes) else b""
            if fault.kind == "late":
                await fault.released()
            elif fault.kind == "cut body":
                part = web.StreamResponse(status=response.status, headers={"Content-Length": str(len(body))})
                await part.prepare(call.http)
                await part.write(body[: len(body) // 2])
                await call.cut()
            elif fault.kind == "duplicate" and call.http.transport is not None:
                self._backend.spawn(self._repeat(fault, call.http.transport, body))
        return response

    @staticmethod
    async def _repeat(fault: Fault, transport: asyncio.Transport, body: bytes) -> None:
        """The same answer once more on the connection, whatever that is used for by then."""
        await fault.released()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write(head.encode() + body)
