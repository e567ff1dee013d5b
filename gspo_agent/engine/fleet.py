"""Fleet: any number of SGLang servers at one version of the weights. Who is not at it gets no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Literal, cast

import aiohttp

from gspo_agent.engine.delivery import Target
from gspo_agent.engine.roster import Roster
from gspo_agent.engine.router import Router
from gspo_agent.engine.worker import Refused, State, Unavailable, Worker
from gspo_agent.errors import ConfigError, EngineError, GspoAgentError

_log = logging.getLogger(__name__)
PauseMode = Literal["in_place", "retract", "abort"]
_GRACE_SECONDS = 10.0  # that an update waits for servers that get no requests: one of them may hang
_SOON_SECONDS = 1.0  # from a look without an answer to the next
_LAST_SECONDS = 60.0  # the longest that passes between two tries to bring a server back


class Fleet(Roster):
    """The servers, who among them may be asked, and the tasks that look after them.

    One task per server looks at it every `look_every` seconds, or at once where something went wrong. A server that
    does not answer, or has other weights, is taken out: its requests go elsewhere. When it answers again it is given
    the current weights, they are verified, and only then does it get requests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        http: aiohttp.ClientSession,
        *,
        pause_mode: PauseMode,
        flush_cache: bool,
        look_every: float,
        max_misses: int,
        probe: Callable[[Worker], Awaitable[object]],
    ) -> None:
        """`probe` raises where a server that was examined cannot be worked with all the same."""
        super().__init__()
        self.target: Target | None = None
        self.prove: Callable[[Worker], Awaitable[bool]] | None = None
        """Asked about a server that was away, once it has the weights: whether it may get requests. False: not now; it
        is asked about again with the next weights."""
        self._released = False
        self._urls, self._http = [url.rstrip("/") for url in urls], http
        self._pause_mode, self._flush_cache, self._look_every = pause_mode, flush_cache, look_every
        self._max_misses, self._probe = max_misses, probe
        self._keepers: dict[str, asyncio.Task[None]] = {}

    @property
    def namespaced(self) -> bool:
        """Whether requests keep their cached prefixes apart by weights: a pause in place does not let go of what
        requests in flight hold, so servers cannot flush then."""
        return self._flush_cache and self._pause_mode == "in_place"

    def adapter(self, worker: Worker) -> str | None:
        """What a request there has to name; None where it has no adapter."""
        return worker.weights if self.target is not None and self.target.adapter else None

    async def lacks(self, adapter: str, worker: Worker) -> bool:
        """Whether it has no such adapter, or one of those behind the same router: it does not say who refused."""
        listed = await asyncio.gather(*(other.adapters() for other in self._beside(worker)))
        return any(adapter not in adapters for adapters in listed)

    # ---- who is there

    async def open(self, patience: float, *, adopt: bool) -> None:
        """Returns when at least one server answered and is what it should be; the others are waited for meanwhile.

        With `adopt`, what they have is what they shall have. Raises ConfigError for one that cannot be worked with, or
        where they were to be adopted and differ; EngineError where none answers for so many seconds.
        """
        for url in self._urls:
            await self.add(url, keep=False)
        try:
            async with asyncio.timeout(patience):
                while not await self._examine_all():  # noqa: ASYNC110 -- a server that starts tells nobody
                    await asyncio.sleep(min(1.0, self._look_every))
        except TimeoutError:
            raise EngineError(
                f"no SGLang server answers: {self.problems()}; start one, or correct engine.urls"
            ) from None
        if adopt:
            found = {worker.url: str(worker.weights) for worker in self.workers if worker.sglang}
            if len(set(found.values())) > 1:
                raise ConfigError(f"servers have different weights: {found}; update them, or leave weight_version out")
            self.target = Target(next(iter(found.values())), None)
            await self._bring([worker for worker in self.workers if worker.sglang])
        for worker in self.workers:
            self._keep(worker)

    async def _examine_all(self) -> bool:
        """Whether one is what it should be."""
        outcomes = await asyncio.gather(*(self._examine(worker) for worker in self.workers), return_exceptions=True)
        for worker, outcome in zip(self.workers, outcomes, strict=True):
            if isinstance(outcome, Unavailable | Refused):
                worker.problem = str(outcome)
            elif outcome is not None:
                raise outcome
        return any(outcome is None for outcome in outcomes)

    async def _examine(self, worker: Worker) -> None:
        worker.proven = False  # it may be started otherwise than before
        await worker.examine()
        if not worker.released:
            await worker.resume()  # whoever paused it before may be dead
            await self._probe(worker)

    async def add(self, url: str, *, keep: bool = True) -> None:
        """A server, or a router with all that are behind it, joins; it is asked once it has the current weights."""
        router = Router(url.rstrip("/"), self._http)
        try:
            found = await router.workers()
        except (Unavailable, Refused):
            self._join(Worker(router.url, self._http), keep)
            return
        for behind in found:
            self._join(Worker(behind, self._http, router=router), keep)
        self._start(router.url, self._keep_router(router))

    def remove(self, url: str) -> None:
        """A server, or a router with all that are behind it, leaves; what is being worked on may end."""
        url = url.rstrip("/")
        gone = [worker for worker in self.workers if url in (worker.url, worker.entry)]
        self.workers = [worker for worker in self.workers if worker not in gone]
        for worker in gone:
            self._take_out(worker, "it left")
        for name in {url, *(worker.url for worker in gone)} & self._keepers.keys():
            self._keepers.pop(name).cancel()

    async def close(self) -> None:
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    def _join(self, worker: Worker, keep: bool) -> None:
        if any(known.url == worker.url for known in self.workers):
            return
        self.workers.append(worker)
        if keep:
            self._keep(worker)

    # ---- who looks after them

    def _keep(self, worker: Worker) -> None:
        self._start(worker.url, self._keep_worker(worker))

    def _start(self, name: str, coroutine: Awaitable[None]) -> None:
        if name not in self._keepers:
            self._keepers[name] = asyncio.ensure_future(coroutine)

    async def _keep_worker(self, worker: Worker) -> None:
        """Looks at one server, every now and then and whenever it is wanted; less often while it cannot be brought
        back."""
        pause = self._look_every
        while True:
            try:
                async with asyncio.timeout(pause):
                    await worker.wanted.wait()
            except TimeoutError:
                pass
            worker.wanted.clear()
            try:
                await self._look(worker)
                pause = self._look_every
            except Refused as refused:  # it is there, and cannot be given the weights
                self._take_out(worker, str(refused))
                pause = min(2 * pause, _LAST_SECONDS)
            except Exception as problem:  # whatever it is, nobody else would look at this server again
                if not isinstance(problem, Unavailable | GspoAgentError):
                    _log.exception("a look at %s failed", worker.url)
                await self._miss(worker, problem)
                pause = min(self._look_every, _SOON_SECONDS)

    async def _miss(self, worker: Worker, problem: Exception) -> None:
        worker.misses += 1
        if worker.state is State.OUT:
            worker.problem = str(problem)
        if worker.misses >= self._max_misses:
            worker.sglang = ""  # what comes back may be another
            with suppress(Unavailable, Refused):  # a router that is gone sends nothing there either
                await self._take_from_traffic(worker, str(problem))

    async def _look(self, worker: Worker) -> None:
        if worker.lock.locked() or worker.state is State.UPDATING:
            return
        async with worker.lock:
            target = self.target
            await worker.model_info()
            if worker.router is not None:
                await worker.router.workers()
            worker.misses = 0
            if not worker.sglang:
                await self._examine(worker)
            # An update that came meanwhile gives them itself, as the next does to who let go of them.
            if target is None or target is not self.target or self._released:
                return
            if not await self._has(worker, target):
                await self._take_from_traffic(worker, f"it has weights {worker.weights!r}, not {target.version!r}")
                if target.bring is None:
                    return
                await self._give(worker, target)
            elif worker.state is State.OUT:
                await (worker.pause("in_place") if self.paused else worker.resume())
            if worker.state is State.OUT and await self._put_in(worker, target):
                _log.info("%s gets requests, at weights %s", worker.url, target.version)

    @staticmethod
    async def _has(worker: Worker, target: Target) -> bool:
        return worker.weights == target.version and (not target.adapter or target.version in await worker.adapters())

    async def _put_in(self, worker: Worker, target: Target) -> bool:
        """Whether it gets requests from now on."""
        if self.prove is not None and not worker.proven and target is self.target:
            if worker.unproven_at == target.version:
                return False
            await worker.resume()  # nothing is held in place where it was away
            if not await self.prove(worker):
                worker.unproven_at = target.version
                worker.problem = "its log-probabilities are compared with the learner's first, under the next weights"
                return False
            if self.paused:
                await worker.pause("in_place")
        if target is not self.target:  # an update came meanwhile, and gives them itself
            return False
        worker.proven = True
        if worker.router is not None and worker.withdrawn:
            await worker.router.put_in(worker)
            worker.withdrawn = False
        self._serve(worker)
        return True

    async def _take_from_traffic(self, worker: Worker, problem: str) -> None:
        self._take_out(worker, problem)
        for call in worker.calls:  # of other weights, or of none: its reply could not be used
            call.cut()
        if worker.router is not None:
            worker.withdrawn = True  # that it is not there is our doing: else it has left
            await worker.router.take_out(worker)

    async def _keep_router(self, router: Router) -> None:
        """Follows who joins and leaves a router."""
        while True:
            await asyncio.sleep(self._look_every)
            try:
                found = await router.workers()
            except (Unavailable, Refused):
                continue
            for worker in [worker for worker in self.workers if worker.router is router]:
                if worker.state is State.SERVING and worker.url not in found:
                    self.remove(worker.url)
            for behind in found:
                self._join(Worker(behind, self._http, router=router), keep=True)

    # ---- what they all do

    async def update(self, target: Target, patience: float) -> None:
        """Returns when every server that gets requests has these weights, verified, and at least one does. For others
        it waits some seconds, or until one of them has the weights where nobody else does.

        Raises EngineError where all that answer refuse, or none answers for so many seconds.
        """
        self.target, self._released = target, False
        serving = self.serving
        for worker in serving:
            worker.state = State.UPDATING
        others = [worker for worker in self.workers if worker.sglang and worker not in serving]
        meanwhile = asyncio.ensure_future(self._bring(others))
        try:
            refusals = await self._bring(serving)
            async with asyncio.timeout(_GRACE_SECONDS if self.serving else None):
                refusals |= await meanwhile
        except TimeoutError:  # whoever looks after them goes on with that
            for worker in others:
                worker.wanted.set()
        finally:
            meanwhile.cancel()
        try:
            async with asyncio.timeout(patience):
                while not self.serving:
                    if refusals and all(worker.url in refusals for worker in self.workers if worker.sglang):
                        raise EngineError(f"no server took weights {target.version}: {'; '.join(refusals.values())}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineError(f"no server could be given weights {target.version}: {self.problems()}") from None

    async def _bring(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Gives the target's weights to servers at once. Returns address -> why it refused."""
        refusals: dict[str, str] = {}

        async def bring(worker: Worker) -> None:
            target = cast(Target, self.target)
            try:
                async with worker.lock:
                    if target.bring is not None:
                        await self._give(worker, target)
                    await self._put_in(worker, target)
            except Refused as refused:
                refusals[worker.url] = str(refused)
                await self._fail(worker, str(refused))
            except Unavailable as problem:
                await self._fail(worker, str(problem))
                worker.wanted.set()

        await asyncio.gather(*map(bring, workers))
        return refusals

    async def _give(self, worker: Worker, target: Target) -> None:
        """Pause, bring, verify, go on; what runs there goes on under the new weights."""
        assert target.bring is not None
        mode = "abort" if target.adapter else self._pause_mode  # a request keeps the adapter that it began with
        if not worker.released:  # else it is paused
            if self.paused and mode == "abort":  # would wait forever for requests that are held in place
                await worker.resume()
            await worker.pause(mode)
        await target.bring(worker, flush_cache=self._flush_cache and not self.namespaced)
        if not self.paused:
            await worker.resume()

    async def _fail(self, worker: Worker, problem: str) -> None:
        """Nobody knows what it has now: what runs there is asked for again elsewhere, and it goes on for nobody."""
        try:
            await self._take_from_traffic(worker, problem)
            await worker.resume()
        except (Unavailable, Refused):
            return

    async def pause(self) -> None:
        """Returns when no server computes a token; requests that come wait here. A server that does not answer is
        taken out, and what it had is asked for again later."""
        self.paused = True
        for call in self.calls():
            call.hold(True)
        await self._all(lambda worker: worker.pause("in_place"))

    async def release(self) -> None:
        """In a pause: servers let go of their memory until the next update; what runs there is computed anew then."""
        self._released = True

        async def release(worker: Worker) -> None:
            await worker.pause("retract")
            async with worker.lock:
                await worker.release()

        await self._all(release)

    async def resume(self) -> None:
        self.paused = False
        await self._all(lambda worker: worker.resume())
        for call in self.calls():
            call.hold(False)
        self._wake()

    async def _all(self, what: Callable[[Worker], Awaitable[None]]) -> None:
        async def one(worker: Worker) -> None:
            try:
                await what(worker)
            except (Unavailable, Refused) as problem:
                self.suspect(worker, str(problem))
                for call in worker.calls:
                    call.cut()

        await asyncio.gather(*(one(worker) for worker in self.serving))

    async def abort(self, rid: str, worker: Worker) -> None:
        """At that server, or at all behind the same router, which does not say who has it."""
        to = [worker] if worker.router is None else self._beside(worker)
        await asyncio.gather(*(other.abort(rid) for other in to), return_exceptions=True)
