"""The calls around generation: pause, weights, memory, cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from gspo_agent.testing.sglang_server.backend import Backend
from gspo_agent.testing.sglang_server.call import Call, Routes
from gspo_agent.testing.sglang_server.reply import answer, done, invalid, refusal

if TYPE_CHECKING:
    from gspo_agent.testing.sglang_server.weights import Weights

PARTS = frozenset({"weights", "kv_cache"})
NO_SESSION = "{} must run between begin_weight_update() and end_weight_update()"
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors"))


class Control:
    def __init__(self, backend: Backend, *, ranks: int) -> None:
        """
        Args:
            ranks: Tensor-parallel ranks: so many handles an update from tensors has.
        """
        self.backend, self.ranks = backend, ranks
        self.session = False
        """Whether an update is open, between begin and end."""
        self.loaded: list[tuple[str, str | None]] = []
        """(path, or names of tensors; version) of every update that took place."""
        self.update_delay = 0.0
        """Seconds that an update takes."""

    @cached_property
    def weights(self) -> Weights:
        """What it was given without a file between."""
        from gspo_agent.testing.sglang_server.weights import Weights  # torch takes seconds, and few ask for it

        return Weights(self.ranks)

    def routes(self) -> Routes:
        return {
            "POST /pause_generation": self.pause,
            "POST /continue_generation": self.resume,
            "POST /update_weights_from_disk": self.update_from_disk,
            "POST /update_weights_from_distributed": self.update_from_distributed,
            "POST /update_weights_from_tensor": self.update_from_tensor,
            "POST /begin_weight_update": self.begin,
            "POST /end_weight_update": self.end,
            "POST /init_weights_update_group": self.init_group,
            "POST /destroy_weights_update_group": self.destroy_group,
            "POST /update_weight_version": self.update_version,
            "GET|POST /get_weights_by_name": self.read_weights,
            "GET|POST /flush_cache": self.flush,
            "GET|POST /release_memory_occupation": self.release_memory,
            "GET|POST /resume_memory_occupation": self.resume_memory,
        }

    async def pause(self, call: Call) -> web.Response:
        mode = call.body.get("mode") or "abort"
        if mode not in ("abort", "retract", "in_place"):
            return invalid(f"mode: {mode!r} is none of abort, retract, in_place")
        gate = self.backend.gate
        async with gate.pausing:
            gate.paused = True
            if mode != "abort":
                self.backend.scheduler.pause(retract=mode == "retract")
            # It waits with the condition held, so after an in_place pause, which lets nothing end, this never returns.
            while mode == "abort" and gate.inside:
                self.backend.abort_all()
                await asyncio.sleep(0.001)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, call: Call) -> web.Response:
        if self.backend.released:
            return refusal(f"memory is released: {sorted(self.backend.released)}; the real server breaks here")
        gate = self.backend.gate
        async with gate.pausing:
            gate.paused = False
            self.backend.scheduler.resume()
            gate.pausing.notify_all()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, call: Call) -> web.Response:
        body = call.body
        path = Path(body["model_path"])
        problem = None
        if body.get("load_format") != "dummy" and not _has_weights(path):
            problem = f"Failed to get weights iterator: Cannot find any model weights with `{path}`."
        success, message = await self._update(call, str(path), problem, "Succeeded to update model weights.")
        if success:
            self.backend.model_path = str(path)
        return done(success, message, num_paused_requests=0)

    async def update_from_distributed(self, call: Call) -> web.Response:
        body = call.body
        group = body.get("group_name", "weight_update_group")
        problem = None
        if not self.session:
            problem = NO_SESSION.format("update_weights_from_distributed")
        elif group not in self.weights.groups:
            problem = f"Failed to receive weights: Group {group} not in {sorted(self.weights.groups)}."
        elif body.get("load_format") != "flattened_bucket":
            problem = "this server receives flattened buckets only"
        elif not len(body["names"]) == len(body["dtypes"]) == len(body["shapes"]):
            problem = "Failed to receive weights: names, dtypes and shapes differ in length."

        async def receive() -> None:
            await self.weights.receive(group, body)

        message = "Succeeded to update parameter online."
        return done(*await self._update(call, " ".join(body["names"]), problem, message, receive))

    async def update_from_tensor(self, call: Call) -> web.Response:
        handles = call.body["serialized_named_tensors"]
        problem = None if self.session else NO_SESSION.format("update_weights_from_tensor")

        async def unpack() -> None:
            self.weights.unpack(handles)

        return done(*await self._update(call, "tensors", problem, "Success", unpack))

    async def read_weights(self, call: Call) -> web.Response:
        found = self.weights.read(call.body["name"], call.body.get("truncate_size", 100))
        return refusal("Get parameter by name failed") if found is None else answer(found)

    async def _update(
        self,
        call: Call,
        what: str,
        problem: str | None,
        message: str,
        load: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[bool, str]:
        """What all updates do, in the server's order: the version changes before the cache refuses to be flushed."""
        body, backend = call.body, self.backend
        version: str | None = body.get("weight_version")
        unchanged = any(fault.kind == "unchanged" for fault in call.faults)
        if body.get("abort_all_requests", False):
            backend.abort_all()
        async with backend.gate.update():
            await asyncio.sleep(self.update_delay)
            if problem is None and "weights" in backend.released:
                problem = "the memory of the weights is released; the real server breaks here"
            if problem is not None:
                return False, problem
            try:
                await (load() if load is not None else asyncio.sleep(0))
            except (RuntimeError, ValueError) as error:
                return False, f"Failed to receive weights: {error}"
            if not unchanged:
                self.loaded.append((what, version))
                backend.scheduler.change_version(version)
                if body.get("flush_cache", True) and not self._flush():
                    return False, NOT_FLUSHED
        if version is not None:
            message += f" Weight version updated to {version}."
            if not unchanged:
                backend.weight_version = version
        return True, message

    def _flush(self) -> bool:
        idle = self.backend.scheduler.idle()
        if idle:
            self.backend.scheduler.cache.clear()
        return idle

    async def begin(self, call: Call) -> web.Response:
        async with self.backend.gate.update():
            if self.session:
                return done(False, "a weight-update session is already open; call end_weight_update() first")
            self.session = True
        return done(True, "Success")

    async def end(self, call: Call) -> web.Response:
        async with self.backend.gate.update():
            if not self.session:
                return done(False, "no weight-update session is open; call begin_weight_update() first")
            self.session = False
        return done(True, "Success")

    async def init_group(self, call: Call) -> web.Response:
        body = call.body
        missing = [key for key in ("master_address", "master_port", "rank_offset", "world_size") if key not in body]
        if missing:
            return invalid(f"missing: {missing}")
        group = body.get("group_name", "weight_update_group")
        if group in self.weights.groups:
            return done(False, f"Failed to initialize custom process group: The group name {group} is already in use.")
        try:
            await self.weights.join(group, body)
        except RuntimeError as error:
            return done(False, f"Failed to initialize custom process group: {error}.")
        return done(True, "Succeeded to initialize custom process group.")

    async def destroy_group(self, call: Call) -> web.Response:
        group = call.body.get("group_name", "weight_update_group")
        if self.weights.groups.pop(group, None) is None:
            return done(False, "The group to be destroyed does not exist.")
        return done(True, "Succeeded to destroy custom process group.")

    async def update_version(self, call: Call) -> web.Response:
        body = call.body
        version = body["new_version"]
        if body.get("abort_all_requests", True):
            self.backend.abort_all()
        if not any(fault.kind == "unchanged" for fault in call.faults):
            self.backend.scheduler.change_version(version)
            self.backend.weight_version = version
        return done(True, f"Weight version updated to {version}", new_version=version)

    async def release_memory(self, call: Call) -> web.Response:
        tags = set(call.body.get("tags") or PARTS)
        backend = self.backend
        if not backend.scheduler.idle():
            return refusal("release_memory_occupation should be called only when server is idle.")
        if tags - PARTS or tags & backend.released:
            return refusal(
                f"cannot release {sorted(tags)}: {sorted(backend.released)} are released, known {sorted(PARTS)}"
            )
        backend.released |= tags
        if "kv_cache" in tags:
            backend.scheduler.cache.clear()
        return answer(None)

    async def resume_memory(self, call: Call) -> web.Response:
        tags = set(call.body.get("tags") or PARTS)
        if not tags <= self.backend.released:
            return refusal(f"cannot resume {sorted(tags)}: released are {sorted(self.backend.released)}")
        self.backend.released -= tags
        return answer(None)

    async def flush(self, call: Call) -> web.Response:
        deadline = asyncio.get_running_loop().time() + float(call.http.query.get("timeout", 0))
        # Nothing tells of idleness, and nobody but a caller that gave a timeout waits for it.
        while not self.backend.scheduler.idle() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if self._flush():
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)
