"""SGLangEngine: any number of SGLang servers over HTTP, as one engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Any, cast

import aiohttp

from gspo_agent.engine.base import Comparison, Completion, Sampled, Sampling, Weights
from gspo_agent.engine.call import Call, escaped
from gspo_agent.engine.counts import Counts
from gspo_agent.engine.delivery import Target, Transport
from gspo_agent.engine.fleet import Fleet, PauseMode
from gspo_agent.engine.probe import probe
from gspo_agent.engine.reply import ForeignWeights, Reply, WrongReply, read_reply
from gspo_agent.engine.request import Asked, checked
from gspo_agent.engine.stream import NoIncrement, Stream
from gspo_agent.engine.worker import Refused, State, Unavailable, Unreachable, Worker
from gspo_agent.errors import EngineError
from gspo_agent.quota import Quota

_CONNECT_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 3.0  # less than the five after which a server closes an idle connection
_INSIST_SECONDS = 0.3  # an abort may overtake the request that it is to end
_LONGEST_BACK_OFF = 10.0
_LOOKS = 20  # at a request, while its time runs
_CONTROL = ("/abort_request", "/pause_generation", "/continue_generation")
_ABORTED = Completion((), "abort")


class SGLangEngine:
    """Implements Engine with SGLang servers, each by its address, or routers by theirs.

    A request of which nothing came (a connection cut, a 5xx, a server that died) is asked for again, elsewhere where
    there is another: nothing of its tokens was used. What a server refuses (4xx) is an EngineError at once. Requests of
    one episode go to the server that has its prefix.

    Seeds: a server started with `--enable-deterministic-inference` draws by (seed, position), so that a cut repeats
    nothing and changes nothing; another ignores them, and draws afresh after a cut.

    >>> engine = SGLangEngine(["http://a:30000", "http://b:30000"], vocab_size=151936)
    >>> await engine.open()
    >>> await engine.update_weights(weights)
    >>> completion = await engine.generate(prompt_ids, Sampling(max_new_tokens=64), request_id="0.0.1-7/")
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        name: str = "policy",
        weight_version: int | None = None,
        context_tokens: int | None = None,
        pause_mode: PauseMode = "in_place",
        flush_cache: bool = True,
        stream: bool = False,
        transport: Transport | None = None,
        quota: Quota | None = None,
        patience: float = 600.0,
        request_seconds: float | None = 1800.0,
        abort_seconds: float = 1.5,
        look_every: float = 5.0,
        max_misses: int = 3,
        max_tries: int = 8,
        back_off: float = 0.1,
    ) -> None:
        """
        Args:
            vocab_size: Ids from there on are refused; a server would die of one.
            weight_version: Our number for the weights that all servers have when they are opened. None: nothing is
                sampled before `update_weights`.
            context_tokens: None: as the servers say.
            pause_mode: What happens to requests while weights are loaded. "in_place": they keep what was computed for
                them. "retract": it is computed anew under the new weights. "abort": they end, and are asked for again.
            flush_cache: No new request sees keys and values of older weights. False: it may, and its logprobs are then
                not quite those of its weights.
            stream: Tokens come as they are sampled, from servers that send increments: what one had sent when it died,
                or was given up, is kept.
            transport: How weights reach the servers; None: from disk.
            patience: Seconds for which requests and updates wait for a server to be there again.
            request_seconds: Time of one try, pauses not counted, to a twentieth; past it the request is tried again.
            abort_seconds: Past them an aborted request ends without what its server may have.
            look_every, max_misses: Seconds between two looks at a server, and how many of them in a row without an
                answer mean that it is gone, with what it had in flight.
            max_tries, back_off: Of one request; seconds before its second try, twice as many before each later one.
        """
        self.name, self.vocab_size, self.turn = name, vocab_size, quota or nullcontext()
        self._urls, self._given_version, self._context = list(urls), weight_version, context_tokens
        self._pause_mode, self._flush_cache, self._stream = pause_mode, flush_cache, stream
        self._transport = transport or Transport()
        self._patience, self._request_seconds, self._abort_seconds = patience, request_seconds, abort_seconds
        self._look_every, self._max_misses = look_every, max_misses
        self._max_tries, self._back_off = max_tries, back_off
        self._weight_version: int | None = None
        self._mark = secrets.token_hex(4)
        """In what servers call the weights that came from here: another run on them counts its own alike."""
        self._versions: dict[str, int] = {}
        """What servers call the weights that were published -> our number."""
        self._calls: dict[str, Call] = {}
        self._counts = Counts()
        self._background: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None
        self._fleet: Fleet | None = None

    @property
    def weight_version(self) -> int:
        if self._weight_version is None:
            raise EngineError(f"engine {self.name!r} has no weights yet; call update_weights, or give weight_version")
        return self._weight_version

    @property
    def context_tokens(self) -> int:
        known = [worker.max_prompt for worker in self.fleet.workers if worker.max_prompt]
        if self._context is not None:
            known.append(self._context)
        if not known:
            raise EngineError(f"engine {self.name!r}: no server says how long a context may be; give context_tokens")
        return min(known)

    @property
    def fleet(self) -> Fleet:
        """The servers."""
        if self._fleet is None:
            raise EngineError(f"engine {self.name!r} is not open; await engine.open() first")
        return self._fleet

    def stats(self) -> dict[str, int]:
        """As of `Counts`, and what runs and waits now."""
        running = sum(len(worker.calls) for worker in self._fleet.workers) if self._fleet else 0
        return {**self._counts.as_dict(), "running": running, "waiting": len(self._calls) - running}

    def unjournaled(self) -> dict[str, int]:
        """Request id -> tokens that came so far; of one that does not stream, all that may come once it was sent. From
        any thread."""
        return {call.id: call.sampled for call in list(self._calls.values())}

    # ---- opening, closing, who is there

    async def open(self) -> None:
        """Looks at the servers: their version, what they serve, whether logprobs come complete.

        Raises ConfigError for one that cannot be worked with; EngineError where none answers in time.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        # No cookies: with one of a balancer's, every request would go where the first one went.
        jar = aiohttp.DummyCookieJar()
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)
        if self._request_seconds is not None:
            self._watch = asyncio.create_task(self._look_at_calls(self._request_seconds / _LOOKS))
        self._fleet = Fleet(
            self._urls,
            self._http,
            pause_mode=self._pause_mode,
            flush_cache=self._flush_cache,
            look_every=self._look_every,
            max_misses=self._max_misses,
            probe=self._probe,
        )
        try:
            await self._fleet.open(self._patience, adopt=self._given_version is not None)
        except BaseException:
            await self.close()
            raise
        if self._given_version is not None and self._fleet.target is not None:
            self._versions[self._fleet.target.version] = self._weight_version = self._given_version

    async def _look_at_calls(self, every: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(every)
            now = loop.time()
            for call in self._calls.values():
                call.look(now)

    async def _probe(self, worker: Worker) -> None:
        await worker.require((*_CONTROL, *self._transport.routes))
        await probe(worker, [token % self.vocab_size for token in (1, 2, 3)], vocab_size=self.vocab_size)

    async def close(self) -> None:
        """Ends what is in flight; whoever waits gets EngineError."""
        fleet, http, self._fleet, self._http = self._fleet, self._http, None, None
        if fleet is None or http is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        for call in self._calls.values():
            call.abort(0.0)
        try:
            await fleet.close()
            await asyncio.gather(*self._background, return_exceptions=True)
        finally:
            await http.close()

    async def add(self, url: str) -> None:
        """A server, or a router, joins; it is asked once it has the current weights."""
        await self.fleet.add(url)

    async def remove(self, url: str) -> None:
        """A server leaves: it gets no further request, and what it is working on may end."""
        self.fleet.remove(url)

    def problems(self) -> dict[str, str]:
        return {} if self._fleet is None else self._fleet.out()

    async def compare_each(self, token_ids: Sequence[int], sampling: Sampling, compare: Comparison) -> None:
        """As promised by Several. Who does not answer is left out."""
        _, room = self._checked(token_ids, sampling, "comparison")
        fleet = self.fleet

        async def prove(worker: Worker) -> bool:
            if (version := self._versions.get(str(worker.weights))) is None:
                return False
            adapter, at = fleet.adapter(worker), sampling.temperature
            ids, logprobs = await probe(worker, token_ids, room, at, vocab_size=self.vocab_size, adapter=adapter)
            return await compare(Sampled(worker.url, worker.precision, version, ids, logprobs))

        fleet.prove = prove
        for worker in fleet.serving:
            with suppress(Unavailable):
                await prove(worker)

    # ---- requests

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continues `token_ids`, at most to the end of the context. Cancelling the call aborts the request."""
        ids, room = self._checked(token_ids, sampling, request_id)
        call = self._calls[request_id] = Call(request_id, self._request_seconds)
        try:
            return await self._ask(call, ids, sampling, room)
        finally:
            call.over = True
            del self._calls[request_id]

    async def _ask(self, call: Call, ids: Any, sampling: Sampling, room: int) -> Completion:
        """Tries until a reply can be used, somebody ends it, or there were too many tries."""
        fleet, avoid = self.fleet, cast(Worker | None, None)
        while (worker := await self._place(call, avoid)) is not None:
            avoid = None
            try:
                reply = await self._try(call, worker, ids, sampling, room)
            except EngineError as error:
                raise EngineError(f"engine {self.name!r}, request {call.id!r}: {worker.url}: {error}") from None
            except (Unreachable, ForeignWeights) as error:
                fleet.suspect(worker, str(error))
                problem: Exception = error
            except (Unavailable, WrongReply, TimeoutError) as error:
                avoid, problem = worker, error
                fleet.check(worker)
            else:
                return self._counts.add(reply)
            if self._fleet is not None and call.stream is not None and (rest := call.stream.rest()) is not None:
                self._counts.rescued += sum(map(len, rest.completion.segments))
                return self._counts.add(rest)
            if call.aborted:
                break
            if call.tries >= self._max_tries:
                raise EngineError(
                    f"engine {self.name!r}, request {call.id!r}: nothing came of {call.tries} tries; the last, at "
                    f"{worker.url}: {problem or 'no reply in time'}"
                )
            self._counts.retries += 1
            await call.wait(min(self._back_off * 2 ** (call.tries - 1), _LONGEST_BACK_OFF))
        if self._fleet is None:
            raise EngineError(f"engine {self.name!r} was closed")
        return _ABORTED

    async def _place(self, call: Call, avoid: Worker | None) -> Worker | None:
        """Waits until a server may be asked; None where the request was ended meanwhile."""
        fleet, loop, until = self.fleet, asyncio.get_running_loop(), 0.0
        while not call.aborted:
            worker = fleet.choose(call.session, avoid)
            if worker is not None:
                return worker
            now = loop.time()
            if not until or fleet.paused:
                until = now + self._patience
            if fleet.target is None or now >= until:
                why = (
                    fleet.problems() if fleet.target else "no weights yet; call update_weights, or give weight_version"
                )
                raise EngineError(f"engine {self.name!r}, request {call.id!r}: no server to ask: {why}")
            fleet.waiting.add(call)
            try:
                await call.wait(until - now)
            finally:
                fleet.waiting.discard(call)
        return None

    async def _try(self, call: Call, worker: Worker, ids: Any, sampling: Sampling, room: int) -> Reply:
        fleet = self.fleet
        version = self._versions.get(str(worker.weights))
        if version is None:
            raise ForeignWeights(f"it has weights {worker.weights!r}")
        asked = Asked(call.next_rid(), sampling, room, self.name, version, self.vocab_size, fleet.adapter(worker))
        stream = Stream(asked, worker.weights, self._versions) if self._stream and worker.increments else None
        namespace = f"weights {self._mark} {worker.weights}" if fleet.namespaced else None
        body = asked.body(ids, namespace=namespace, stream=stream is not None)
        call.worker, call.asked, call.stream = worker, room, stream
        worker.calls.add(call)
        refused: Refused | None = None
        try:
            async with call.flight(held=fleet.paused):
                if stream is None:
                    raw = await worker.generate(body, call.session)
                else:
                    await worker.stream(body, call.session, stream.take)
        except (TimeoutError, asyncio.CancelledError):
            if self._fleet is not None:
                self._keep(fleet.abort(asked.rid, worker))
            raise
        except NoIncrement:
            worker.increments = False
            raise
        except Refused as error:
            refused = error
        finally:
            worker.calls.discard(call)
            call.worker = None
            call.landed()
        if refused is not None:
            if asked.adapter is not None and await fleet.lacks(asked.adapter, worker):
                raise ForeignWeights(f"it has no adapter {asked.adapter!r}: {refused}")
            raise refused
        return read_reply(raw, asked, self._versions) if stream is None else stream.reply()

    def _checked(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> tuple[Any, int]:
        """As `request.checked`. Raises EngineError for what no server may see."""
        try:
            if request_id in self._calls:
                raise ValueError("a request with this id is in flight; ids must be unique")
            return checked(token_ids, sampling, vocab_size=self.vocab_size, context_tokens=self.context_tokens)
        except ValueError as problem:
            raise EngineError(f"engine {self.name!r}, request {request_id!r}: {problem}") from None

    async def abort(self, request_id: str) -> None:
        """As promised by Engine. A server that is paused ends nothing: there, and where it does not answer, the request
        ends after `abort_seconds` without tokens."""
        call = self._calls.get(request_id)
        if call is None or call.aborted:
            return
        call.abort(self._abort_seconds)
        if call.worker is not None:
            await self.fleet.abort(call.rid, call.worker)
            self._keep(self._insist(call))

    async def _insist(self, call: Call) -> None:
        while call.worker is not None and self._fleet is not None:
            await asyncio.sleep(_INSIST_SECONDS)
            if call.worker is not None:
                await self._fleet.abort(call.rid, call.worker)

    async def clear(self, prefix: str) -> None:
        """As promised by Engine. Requests of a process that died end by themselves within seconds, when their server
        finds that nobody listens; those with several tokenizer processes end them at once."""
        await asyncio.gather(*(self.abort(id) for id in list(self._calls) if id.startswith(prefix)))
        aborts = (worker.abort(escaped(prefix)) for worker in self.fleet.workers if worker.state is not State.OUT)
        await asyncio.gather(*aborts, return_exceptions=True)

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---- all servers

    async def pause(self) -> None:
        await self.fleet.pause()

    async def resume(self) -> None:
        await self.fleet.resume()

    async def release(self) -> None:
        await self.fleet.release()

    async def update_weights(self, weights: Weights) -> None:
        """Every server gets the weights as `transport` says, and says that it has them; who does not gets no request
        until it does. EngineError where none did."""
        name = f"{weights.version}@{self._mark}"
        delivery = self._transport.delivery(weights, name)
        async with self._updating:
            self._versions[name] = weights.version
            await self.fleet.update(Target(name, delivery), self._patience)
            self._weight_version = weights.version
