"""Adapters beside the model: which are there, who uses them, and the calls that load and unload them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from gspo_agent.testing.sglang_server.backend import Backend
from gspo_agent.testing.sglang_server.call import Call, Routes
from gspo_agent.testing.sglang_server.reply import answer

NOT_ENABLED = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."


class Adapters:
    def __init__(self, backend: Backend, *, enabled: bool) -> None:
        self.backend, self.enabled = backend, enabled
        self.loaded: dict[str, str] = {}
        """Name -> directory."""
        self._known: dict[str, str] = {}
        """Of all that were ever loaded."""
        self._changing = asyncio.Lock()

    def routes(self) -> Routes:
        return {
            "POST /load_lora_adapter": self.load,
            "POST /unload_lora_adapter": self.unload,
            "GET /v1/models": self.models,
        }

    def use(self, name: str | None) -> None:
        """Before a request runs. One that was unloaded is loaded again, as the server does; ValueError where it cannot
        be."""
        if name is None or name in self.loaded:
            return
        if not self.enabled:
            raise ValueError(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")
        if name not in self._known:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {name}")
        if problem := self._problem(name, self._known[name]):
            raise ValueError(f"Failed to implicitly load LoRA adapter {name}: {problem}")
        self.loaded[name] = self._known[name]

    def _problem(self, name: str, path: str) -> str | None:
        if not self.enabled:
            return NOT_ENABLED
        if name in self.loaded:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        file = Path(path) / "adapter_config.json"
        return None if file.is_file() else f"[Errno 2] No such file or directory: '{file}'"

    async def load(self, call: Call) -> web.Response:
        name, path = call.body["lora_name"], call.body["lora_path"]
        async with self._changing:
            problem = self._problem(name, path)
            if problem is None and not any(fault.kind == "unchanged" for fault in call.faults):
                self.loaded[name] = self._known[name] = path
        return self._answer(problem)

    async def unload(self, call: Call) -> web.Response:
        """It is gone for new requests at once; the answer waits for those that have it."""
        name = call.body["lora_name"]
        async with self._changing:
            if not self.enabled:
                return self._answer(NOT_ENABLED)
            if self.loaded.pop(name, None) is None:
                return self._answer(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.loaded)}")
            while any(request.adapter == name for request in self.backend.scheduler.live):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return self._answer(None)

    async def models(self, call: Call) -> web.Response:
        path, size = self.backend.model_path, self.backend.context_tokens
        own = {"id": path, "object": "model", "owned_by": "sglang", "root": path, "parent": None}
        adapters = [
            {**own, "id": name, "root": root, "parent": path, "max_model_len": None}
            for name, root in self.loaded.items()
        ]
        return answer({"object": "list", "data": [{**own, "max_model_len": size}, *adapters]})

    def _answer(self, problem: str | None) -> web.Response:
        content: dict[str, Any] = {
            "success": problem is None,
            "error_message": problem or "",
            "loaded_adapters": self.loaded if problem is None else None,
        }
        return answer(content, 200 if problem is None else 400)
