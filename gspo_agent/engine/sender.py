"""Sender: brings weights to servers from the process that they are in, without a file between."""

from __future__ import annotations

import base64
import io
import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gspo_agent.errors import EngineError

Named = list[tuple[str, Tensor]]
GROUP = "gspo_agent"
"""What servers call the group that they are in with this process."""
_DEVICE = 6  # where the device stands among what a CUDA tensor is rebuilt from


class Stale(EngineError):
    """Here are other weights by now than those that were asked for."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one message carries, in the order of its bytes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a server's ranks, numbered from 1, find rank 0."""

    link: str
    host: str
    port: int
    world_size: int
    backend: str


class Sender:
    """The weights' own end of every transfer; who speaks with the servers may be in another process.

    Each server has a group of its own with this process, so that one that dies or hangs in the middle takes no other
    with it: a broadcast to all at once ends for none of them then. No call but `wait` waits for a server.
    """

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], device: torch.device) -> None:
        """`tensors`: as of `Weights`."""
        self._tensors, self._device = tensors, device
        self._version: int | None = None
        self._links: dict[str, Link] = {}
        self._staged: tuple[tuple[int, int, int], Tensor, Named] | None = None
        self._staging = threading.Lock()

    def hold(self, version: int) -> None:
        """From now on the weights are those of `version`."""
        self._version = version

    def forget(self) -> None:
        """From now on they change."""
        self._version = self._staged = None

    def named(self, version: int) -> Named:
        """The tensors, each once; they change with the next step."""
        self._check(version)
        return untied(self._tensors())

    def outline(self, version: int, max_bytes: int) -> list[Bucket]:
        """What is to be sent, in buckets of at most so many bytes; a larger tensor goes alone."""
        self._check(version)
        return [
            Bucket(
                tuple(name for name, _ in named),
                tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
                tuple(tuple(tensor.shape) for _, tensor in named),
            )
            for named in self._buckets(max_bytes)
        ]

    def listen(self, server: str, ranks: int, cuda: bool, seconds: float) -> Meeting:
        """Waits, in a thread, for so many ranks of the server with this address to join; `wait` says when they have.

        Args:
            cuda: Whether they compute on GPUs, as this process has to for NCCL.
            seconds: The most that joining, or any one bucket, may take.
        """
        name = secrets.token_hex(8)
        backend = "nccl" if cuda and self._device.type == "cuda" else "gloo"
        link = self._links[name] = Link(backend, ranks + 1, timedelta(seconds=seconds))
        return Meeting(name, _own_address(server), link.port, ranks + 1, backend)

    def send(self, link: str, version: int, number: int, max_bytes: int) -> None:
        """Begins to send one bucket as one row of bytes; `wait` says when it was taken."""
        row, _ = self._stage(version, number, max_bytes)
        self._link(link).broadcast(row)

    def wait(self, link: str, seconds: float) -> None:
        """Returns when the last that was begun is done; EngineError where it failed, or takes longer."""
        self._link(link).wait(seconds)

    def leave(self, link: str) -> None:
        """Whoever is in the group and waits finds it broken."""
        if (found := self._links.pop(link, None)) is not None:
            found.close()

    def handles(self, version: int, number: int, max_bytes: int, ranks: int) -> list[str]:
        """One bucket, once per tensor-parallel rank, as a server of the same machine reads it: tensors on a GPU by
        handle, to be used before the next bucket; others whole."""
        _, named = self._stage(version, number, max_bytes)
        return [base64.b64encode(_pickled(named)).decode() for _ in range(ranks)]

    def _check(self, version: int) -> None:
        if version != self._version:
            raise Stale(f"weights {version} are not here any more")

    def _buckets(self, max_bytes: int) -> list[Named]:
        """Of one dtype each, so that none of its tensors begins in the middle of an element."""
        buckets: list[Named] = []
        size = 0
        for name, tensor in untied(self._tensors()):
            if not buckets or size + tensor.nbytes > max_bytes or buckets[-1][0][1].dtype != tensor.dtype:
                buckets.append([])
                size = 0
            buckets[-1].append((name, tensor))
            size += tensor.nbytes
        return buckets

    @torch.no_grad()
    def _stage(self, version: int, number: int, max_bytes: int) -> tuple[Tensor, Named]:
        """A copy of one bucket as a row of bytes, and its tensors in there: the same for all servers that are at it."""
        with self._staging:
            key = version, number, max_bytes
            if self._staged is None or self._staged[0] != key:
                self._check(version)
                self._staged = None
                bucket = self._buckets(max_bytes)[number]
                row = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
                parts = torch.split(row, [tensor.nbytes for _, tensor in bucket])
                named = [
                    (name, part.view(tensor.dtype).view(tensor.shape))
                    for (name, tensor), part in zip(bucket, parts, strict=True)
                ]
                self._staged = key, row, named
            _, row, named = self._staged
            self._check(version)
            return row, named

    def _link(self, name: str) -> Link:
        if name not in self._links:
            raise EngineError(f"{name} is no group that this process is in")
        return self._links[name]


class Link:
    """A process group with one server, of which this process is rank 0; torch's default group is not touched."""

    def __init__(self, backend: str, world_size: int, timeout: timedelta) -> None:
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.port: int = self._store.port
        self._backend, self._world_size, self._timeout = backend, world_size, timeout
        self._group: Future[Any] = _in_thread(self._join)
        self._last: Future[Any] = self._group

    def broadcast(self, tensor: Tensor) -> None:
        before = self._last

        def work() -> None:
            before.result()
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self._group.result().broadcast([tensor], options).wait(self._timeout)

        self._last = _in_thread(work)

    def wait(self, seconds: float) -> None:
        try:
            self._last.result(seconds)
        except TimeoutError:
            raise EngineError(f"nothing came of it within {seconds:g} s") from None
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """In a thread, which is the last to know the group: its end waits for what is under way in it."""
        owned = [self._group]
        self._group, self._last = Future(), Future()

        def work() -> None:
            with suppress(Exception):
                owned.pop().result().abort()

        _in_thread(work)

    def _join(self) -> Any:
        # As the server's end finds its keys: the group's name by SGLang and by torch, then the device.
        device = "cuda/" if self._backend == "nccl" else "cpu/"
        store = PrefixStore(device, PrefixStore(f"{GROUP}/", PrefixStore(GROUP, self._store)))
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, self._world_size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, 0, self._world_size, options)


def untied(named: Iterable[tuple[str, Tensor]]) -> Named:
    """Each tensor once: of tied ones the first name is enough."""
    first = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(list(named))}
    return [(name, tensor.detach()) for name, tensor in reversed(first.values())]


def _own_address(server: str) -> str:
    """This machine's address as that server sees it."""
    parts = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(way.getsockname()[0])


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """In a daemon thread, for which nobody waits at the end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sender", daemon=True).start()
    return future


def _pickled(named: Sequence[tuple[str, Tensor]]) -> bytes:
    if not any(tensor.is_cuda for _, tensor in named):
        # A pickled tensor brings the whole memory that it is a part of.
        return pickle.dumps([(name, tensor.clone()) for name, tensor in named], protocol=4)
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(list(named))
    return buffer.getvalue()


class _HandlePickler(ForkingPickler):
    """Names GPUs by their own ids, since two processes may number them differently."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
