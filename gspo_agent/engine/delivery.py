"""How one server gets weights: from disk, by broadcast, or as tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gspo_agent.background import off_loop
from gspo_agent.engine.adapter import base_of, is_adapter
from gspo_agent.engine.base import Source, Weights
from gspo_agent.engine.sender import GROUP, Bucket, Sender, Stale
from gspo_agent.engine.worker import Refused, Unavailable, Worker
from gspo_agent.errors import ConfigError, EngineError

_PUBLISHED = re.compile(r"\d+@[0-9a-f]+")  # what an engine calls an adapter


class Delivery(Protocol):
    async def __call__(self, worker: Worker, *, flush_cache: bool) -> None:
        """Returns when the server, which is paused, has the weights and says so. Raises Refused and Unavailable; then
        nobody knows what it has."""
        ...


@dataclass(frozen=True, slots=True)
class FromDisk:
    """Every server reads a directory, which it sees under the same path."""

    name: str
    path: str
    seconds: float
    """The most that it may take."""

    async def __call__(self, worker: Worker, *, flush_cache: bool) -> None:
        await worker.load(self.path, self.name, flush_cache=flush_cache, seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class AsAdapter:
    """Every server reads an adapter from a directory, beside the model that it is of.

    A request has the adapter that it names, to its end. So those in flight end with the pause, and who came too late
    for that still finds the one before; it is unloaded with the next update, when nothing of it runs any more.
    """

    name: str
    path: str
    base: str
    seconds: float
    """The most that it may take, and as much for the model."""

    async def __call__(self, worker: Worker, *, flush_cache: bool) -> None:
        if not worker.takes_adapters or worker.replicas > 1:
            why = "has data-parallel replicas" if worker.takes_adapters else "was started without --enable-lora"
            raise ConfigError(
                f"{worker.url} {why}, and takes no adapters; start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules as in learner.lora, and one replica"
            )
        info = await worker.model_info()
        before, ours = str(worker.weights), self.name.partition("@")[2]
        if not before.endswith(f"@{ours}") and (
            before != "default" or _place(Path(str(info.get("model_path")))) != self.base
        ):
            await worker.load(self.base, f"model@{ours}", flush_cache=True, seconds=self.seconds)
        await worker.load_adapter(self.path, self.name, seconds=self.seconds)
        for old in sorted(await worker.adapters() - {self.name, before}):
            if _PUBLISHED.fullmatch(old):
                with suppress(Refused):  # it has gone by itself
                    await worker.unload_adapter(old)


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that all are to have."""

    version: str
    bring: Delivery | None
    """None: nobody knows where they are; who lacks them stays out."""

    @property
    def adapter(self) -> bool:
        """Whether requests have to name it."""
        return isinstance(self.bring, AsAdapter)


@dataclass(frozen=True, slots=True)
class Transfer(ABC):
    """From the process that has the weights, in buckets; possible as long as it has them."""

    name: str
    """What the server is to call them."""
    version: int
    source: Source
    max_bytes: int
    """Of a bucket."""
    seconds: float
    """The most that one bucket may take."""

    async def __call__(self, worker: Worker, *, flush_cache: bool) -> None:
        if worker.replicas > 1:
            raise ConfigError(
                f"{worker.url} has data-parallel replicas or pipeline stages, which take weights from disk only; write "
                'engine.weights = "disk"'
            )
        linked = worker.link is not None
        try:
            await self._transfer(worker, flush_cache)
        except Refused:
            if not linked:
                raise
            await self._transfer(worker, flush_cache)  # a server that restarted knows nothing of its group

    async def _transfer(self, worker: Worker, flush_cache: bool) -> None:
        try:
            buckets = await self._ask(Sender.outline, self.version, self.max_bytes)
            await self._prepare(worker)
            await worker.begin_update(self.name)
            for number, bucket in enumerate(buckets):
                last = number == len(buckets) - 1
                await self._bring(worker, number, bucket, {"flush_cache": flush_cache and last})
            await worker.end_update(self.name)
        except Stale as stale:
            await self._give_up(worker)
            raise Refused(f"{worker.url} gets the next weights: {stale}") from None
        except BaseException:
            await self._give_up(worker)
            raise

    async def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await off_loop(self.source, function, *arguments)

    async def _prepare(self, worker: Worker) -> None:
        return None

    @abstractmethod
    async def _bring(self, worker: Worker, number: int, bucket: Bucket, options: dict[str, Any]) -> None: ...

    async def _give_up(self, worker: Worker) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Broadcast(Transfer):
    """Through a process group of the server's ranks and the weights' process, over NCCL or gloo; it stays from one
    update to the next."""

    async def _prepare(self, worker: Worker) -> None:
        if worker.link is not None and worker.link[0] == self.source:
            return
        await self._give_up(worker)
        try:
            meeting = await self._ask(Sender.listen, worker.url, worker.ranks, worker.cuda, self.seconds)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"{worker.url}: no process group can be opened for it: {error}") from None
        worker.link = self.source, meeting.link
        where = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": 1,
            "world_size": meeting.world_size,
            "group_name": GROUP,
            "backend": meeting.backend,
        }
        with suppress(Refused):  # one that it is in with a process that died
            await worker.post("/destroy_weights_update_group", {"group_name": GROUP}, seconds=self.seconds)
        await worker.post("/init_weights_update_group", where, seconds=self.seconds)
        await self._settle(worker, meeting.link)

    async def _bring(self, worker: Worker, number: int, bucket: Bucket, options: dict[str, Any]) -> None:
        assert worker.link is not None
        link = worker.link[1]
        await self._ask(Sender.send, link, self.version, number, self.max_bytes)
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": GROUP,
            "load_format": "flattened_bucket",
            "abort_all_requests": False,
            **options,
        }
        await worker.post("/update_weights_from_distributed", body, seconds=self.seconds)
        await self._settle(worker, link)

    async def _settle(self, worker: Worker, link: str) -> None:
        """The server has what it waited for: so this end must be done too."""
        try:
            await self._ask(Sender.wait, link, self.seconds)
        except EngineError as error:
            raise Unavailable(f"{worker.url}: {error}") from None

    async def _give_up(self, worker: Worker) -> None:
        if worker.link is not None:
            (source, link), worker.link = worker.link, None
            await off_loop(source, Sender.leave, link)


@dataclass(frozen=True, slots=True)
class Handles(Transfer):
    """As tensors that a server of the same machine maps into its own memory, one handle per tensor-parallel rank."""

    async def _bring(self, worker: Worker, number: int, bucket: Bucket, options: dict[str, Any]) -> None:
        handles = await self._ask(Sender.handles, self.version, number, self.max_bytes, worker.ranks)
        body = {"serialized_named_tensors": handles, "load_format": None, "abort_all_requests": False, **options}
        await worker.post("/update_weights_from_tensor", body, seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class Transport:
    """How an engine's servers get weights."""

    kind: Literal["disk", "distributed", "tensor"] = "disk"
    max_bytes: int = 512 << 20
    """Of one bucket; a larger tensor goes alone."""
    seconds: float = 900.0
    """The most that a server may take to load from disk, to join its group, or to take one bucket."""

    @property
    def routes(self) -> tuple[str, ...]:
        """What a server has to have for it."""
        if self.kind == "disk":
            return ("/update_weights_from_disk",)
        group = ("/init_weights_update_group", "/destroy_weights_update_group") if self.kind == "distributed" else ()
        update = ("/begin_weight_update", "/end_weight_update", "/update_weight_version")
        return (*update, *group, f"/update_weights_from_{self.kind}")

    def delivery(self, weights: Weights, name: str) -> Delivery:
        """`name`: what servers are to call them. Raises EngineError where nobody could bring these weights so."""
        version, path, source = weights.version, weights.path, weights.source
        if self.kind == "disk":
            if path is None:
                raise EngineError(
                    f"weights come from disk, and version {version} was not saved: give Weights.path, a directory with "
                    "config.json and safetensors that every server sees"
                )
            if is_adapter(path):
                return AsAdapter(name, _place(path), _place(base_of(path)), self.seconds)
            return FromDisk(name, _place(path), self.seconds)
        if source is None:
            raise EngineError(
                f"weights {version} have nobody who could send them: give Weights.source, as Learner.weights does, or "
                'write engine.weights = "disk"'
            )
        kind = Broadcast if self.kind == "distributed" else Handles
        return kind(name, version, source, self.max_bytes, self.seconds)


def _place(path: Path) -> str:
    """As servers are told of it. What is no directory here is a name that they know, as on a hub."""
    return str(path.resolve() if path.exists() else path)
