"""The engines of a victim: the scripted and the local one, each telling the outside what it samples, and each able to
break as engines do."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.engine.local import LocalEngine
from gspo_agent.testing import ScriptedEngine
from tests.faults.outside import Outside
from tests.faults.world import policy

BASE = 0
"""The version of what an engine holds after a restart, before anything was published to it."""


class Scripted(ScriptedEngine):
    """A server behind a client: it may lose its requests and its weights, and is given the last ones again before it
    takes traffic."""

    def __init__(self, outside: Outside, *, chunk: int, delay: float) -> None:
        super().__init__(policy, weight_version=BASE, chunk=chunk, delay=delay)
        self.on_tokens = lambda *words: outside.write("tokens", *words)
        self.updates_in_flight = 0
        self._outside = outside
        self._latest: Weights | None = None
        self._up = asyncio.Event()
        self._restarts = 0
        self._tokens = 0

    def stats(self) -> dict[str, int]:
        counts = {"tokens": self._tokens, "prefill_tokens": 0, "cached_tokens": 0}
        return {**counts, "running": len(self._live), "waiting": 0}

    @property
    def live(self) -> list[str]:
        return list(self._live)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        await self._up.wait()
        restarts = self._restarts
        completion = await super().generate(token_ids, sampling, request_id=request_id)
        if self._restarts != restarts:
            return Completion((), "abort")  # the server took it along
        self._tokens += sum(map(len, completion.segments))
        return completion

    async def update_weights(self, weights: Weights) -> None:
        self.updates_in_flight += bool(self._live)
        self._outside.write("weights", weights.version, fingerprint(weights))
        await super().update_weights(weights)
        self._latest = weights
        self._up.set()

    async def restart(self, seconds: float) -> None:
        """Every request is gone and the weights are the base ones; the last ones are published before any traffic."""
        self._restarts += 1
        self._up.clear()
        self.weight_version = BASE
        self._aborted |= self._live
        await asyncio.sleep(seconds)
        if not self._up.is_set() and self._latest is not None:
            await self.update_weights(self._latest)

    async def break_down(self) -> None:
        self.fail_next = max(1, len(self._live))

    async def publish_again(self) -> None:
        if self._latest is not None:
            await self.update_weights(self._latest)


class Local(LocalEngine):
    """The embedded engine."""

    def __init__(self, outside: Outside, model: Any) -> None:
        super().__init__(model)
        self.updates_in_flight = 0
        self._outside = outside
        self._latest: Weights | None = None

    @property
    def live(self) -> list[str]:
        return list(self._in_flight)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        completion = await super().generate(token_ids, sampling, request_id=request_id)
        position = len(token_ids)
        for segment in completion.segments:
            self._outside.write("tokens", request_id, position, len(segment), segment.weight_version)
            position += len(segment)
        return completion

    async def update_weights(self, weights: Weights) -> None:
        self.updates_in_flight += bool(self._in_flight)
        tensors = [(name, tensor.detach().clone()) for name, tensor in weights.tensors()]
        self._latest = Weights(weights.version, None, lambda: tensors)
        self._outside.write("weights", weights.version, fingerprint(self._latest))
        await super().update_weights(self._latest)

    async def restart(self, seconds: float) -> None:
        await self.break_down()

    async def break_down(self) -> None:
        def broken() -> None:
            raise RuntimeError("injected")

        self._send(broken)

    async def publish_again(self) -> None:
        if self._latest is not None:
            await self.update_weights(self._latest)


def fingerprint(weights: Weights) -> int:
    total = 0
    for name, tensor in weights.tensors():
        total = zlib.crc32(tensor.detach().cpu().numpy().tobytes(), zlib.crc32(name.encode(), total))
    return total
