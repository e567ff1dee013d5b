"""Servers: SGLang servers of this machine, started, watched, started again, and ended with all their processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from gspo_agent.engine.server import Condition, Server
from gspo_agent.errors import EngineError, written
from gspo_agent.serving_config import ServersConfig

_CLOSE_SECONDS, _CUT_SECONDS = 20.0, 0.5
_ANSWER_SECONDS = 30.0
_SOON_SECONDS = 1.0  # between two questions whether one is ready


class Servers:
    """Keeps them running while its `with` block does; EngineError out of the block when the last one is given up, or
    when one ends before it was ever ready.

    >>> async with Servers(config, model, Path("runs/shop/servers")) as servers:
    ...     await servers.ready()
    ...     engine = SGLangEngine(servers.urls, vocab_size=vocab_size)
    """

    def __init__(
        self,
        config: ServersConfig,
        model: Path,
        directory: Path,
        *,
        gpus: Sequence[Sequence[str]] = (),
        shared: bool = False,
        tell: Callable[[str], None] = lambda text: None,
        back_off: float = 1.0,
        look_every: float = 10.0,
    ) -> None:
        """
        Args:
            model: What they serve until they are given other weights.
            directory: For their logs, N.log, their temporary files, N.tmp, which go with them, and servers.json, which
                says where they are.
            gpus: Of each server, as CUDA_VISIBLE_DEVICES has them.
            shared: Others may use them; it stands in servers.json.
            tell: Called with a line about whatever happens to one.
            back_off: Seconds before the first restart in an hour, twice as many before each later one.
        """
        self._config, self._directory, self._model = config, directory, model
        self._shared, self._tell, self._back_off, self._look_every = shared, tell, back_off, look_every
        with written(directory):
            directory.mkdir(parents=True, exist_ok=True)
        shares = list(gpus) or [()] * config.count
        self.servers = [
            Server(number, config, model, directory / f"{number}.log", port, share)
            for number, (port, share) in enumerate(zip(_ports(config, directory), shares, strict=True))
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closing = False
        self._body: asyncio.Task[Any] | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    async def ready(self) -> None:
        """Returns when each of them can compute a token, or has been able to."""
        while not all(server.proven for server in self.servers):
            self._changed.clear()
            await self._changed.wait()

    def problems(self) -> dict[str, str]:
        """Address -> what is the matter, of those that were ready once and are not now."""
        now = time.monotonic()
        return {
            server.url: f"{server.condition}, {now - server.since:.0f} s{server.problem and f': {server.problem}'}"
            for server in self.servers
            if server.proven and server.condition is not Condition.READY
        }

    def __str__(self) -> str:
        counts = [(c, sum(server.condition is c for server in self.servers)) for c in Condition]
        return ", ".join(f"{count} {condition}" for condition, count in counts if count)

    async def __aenter__(self) -> Self:
        self._body = asyncio.current_task()
        self._http = aiohttp.ClientSession()
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]
        for task in self._keepers:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._body is not None
        self._closing = True
        for server in self.servers:
            server.end()
        for task in self._keepers:
            task.cancel()
        # Who is cut waits no longer than a moment: the keepers need nobody.
        cut = isinstance(error, asyncio.CancelledError) and self._failure is None
        try:
            try:
                await asyncio.wait(self._keepers, timeout=_CUT_SECONDS if cut else _CLOSE_SECONDS)
            finally:
                if self._http is not None:
                    await self._http.close()
        except asyncio.CancelledError:
            if self._failure is None:
                raise
        if self._failure is not None and self._body.uncancel() == 0:
            raise self._failure from None

    # ---- one server

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A keeper's task that was not cancelled: its server has been given up."""
        if task.cancelled() or self._closing or self._failure is not None:
            return
        problem = task.exception()
        if problem is None and not all(server.condition is Condition.GIVEN_UP for server in self.servers):
            return
        if problem is None:
            problem = EngineError("no SGLang server is left; the last: " + self._blamed(self.servers[-1]))
        self._failure = problem
        if self._body is not None:
            self._body.cancel()

    async def _keep(self, server: Server) -> None:
        """Starts it, and again whenever it has ended, until that was too often."""
        while True:
            problem = await self._live(server)
            if not server.proven:
                raise EngineError(self._blamed(server, problem))
            wait = server.next_restart(self._config.max_restarts, self._back_off)
            if wait is None:
                server.enter(Condition.GIVEN_UP, problem)
                self._tell(
                    f"{server.name} {problem}; it was started again too often, and is given up: see {server.log}"
                )
                return
            server.enter(Condition.DOWN, problem)
            self._tell(f"{server.name} {problem}; it is started again in {wait:.0f} s; its log: {server.log}")
            await asyncio.sleep(wait)

    async def _live(self, server: Server) -> str:
        """One life of its processes, which are all gone when this returns; why it ended."""
        server.enter(Condition.STARTING)
        try:
            exited = server.start()
        except EngineError as error:
            return str(error)
        self._write_down()
        watch = asyncio.create_task(self._watch(server))
        try:
            await asyncio.wait((exited, watch), return_when=asyncio.FIRST_COMPLETED)
            return watch.result() if watch.done() else f"ended with status {exited.result()}"
        finally:
            watch.cancel()
            server.end()
            await asyncio.wait((exited,), timeout=_CLOSE_SECONDS)
            server.sweep()

    async def _watch(self, server: Server) -> str:
        """Follows it from its start; returns what is wrong with it once that is certain."""
        begun = time.monotonic()
        while not await self._answers(server, "/health_generate"):
            if time.monotonic() - begun > self._config.ready:
                return f"was not ready after {self._config.ready:.0f} s"
            await asyncio.sleep(min(_SOON_SECONDS, self._look_every))
        self._tell(f"{server.name} is ready after {time.monotonic() - begun:.0f} s")
        server.proven = True
        server.enter(Condition.READY)
        self._changed.set()
        well = time.monotonic()
        while True:
            await asyncio.sleep(self._look_every)
            # The scheduler has a part in the answer, and has it in a pause too: there no token could be asked for.
            if await self._answers(server, "/server_info"):
                well = time.monotonic()
            elif time.monotonic() - well > self._config.hang:
                return f"answered nothing for {time.monotonic() - well:.0f} s"

    async def _answers(self, server: Server, path: str) -> bool:
        assert self._http is not None
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with (
                asyncio.timeout(min(_ANSWER_SECONDS, self._config.hang)),
                self._http.get(server.url + path) as response,
            ):
                return response.status == 200
        return False

    def _blamed(self, server: Server, problem: str = "") -> str:
        """What is wrong with it, with the end of its log and a remedy where there is one."""
        tail = server.tail()
        package = self._config.module.partition(".")[0]
        remedy = (
            f"; install it there (pip install '{package}'), or name an interpreter that has it: engine.servers.python"
            if f"No module named '{package}'" in tail
            else ""
        )
        return f"{server.name} {problem or server.problem}{remedy}; {server.log} ends with\n{tail}"

    def _write_down(self) -> None:
        record = {
            "pid": os.getpid(),
            "model": str(self._model),
            "shared": self._shared,
            "servers": [
                {"url": server.url, "pid": server.pid, "gpus": server.gpus, "log": str(server.log)}
                for server in self.servers
            ],
        }
        path = self._directory / "servers.json"
        with written(path):
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_text(json.dumps(record, indent=1))
            temporary.replace(path)


def read_servers(directory: Path) -> dict[str, Any]:
    """What servers.json says; {} where it says nothing."""
    try:
        record = json.loads((directory / "servers.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _ports(config: ServersConfig, directory: Path) -> list[int]:
    """Those that are given; else the ones of the last start, as far as they are free, so that who used those finds
    these."""
    if config.port is not None:
        return list(range(config.port, config.port + config.count))
    known: list[int] = []
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # who wrote that file is another
        known = [int(one["url"].rpartition(":")[2]) for one in read_servers(directory).get("servers", ())]
    with ExitStack() as probes:  # held until all are found, so that none is found twice

        def bound(port: int) -> int:
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, bool(port))
            probe.bind((config.host, port))
            return int(probe.getsockname()[1])

        ports = []
        for wanted in dict.fromkeys(known):
            with suppress(OSError, OverflowError):
                ports.append(bound(wanted))
        try:
            return [*ports, *(bound(0) for _ in range(config.count - len(ports)))][: config.count]
        except OSError as error:
            raise EngineError(
                f"nobody can listen at {config.host!r} here ({error.strerror}); correct engine.servers.host"
            ) from None
