"""What the server says of itself: health, model, configuration, load."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from aiohttp import web

from gspo_agent.testing.sglang_server.backend import Backend
from gspo_agent.testing.sglang_server.call import Call, Routes
from gspo_agent.testing.sglang_server.reply import answer


class Info:
    def __init__(self, backend: Backend, *, version: str, health_timeout: float, args: dict[str, Any]) -> None:
        """
        Args:
            args: What /server_info gives beside the version.
        """
        self.backend, self.version, self.health_timeout, self.args = backend, version, health_timeout, args

    def routes(self) -> Routes:
        return {
            "GET /health": self.health,
            "GET /health_generate": self.health,
            "GET /ready": self.ready,
            "GET /model_info": self.model_info,
            "GET /get_model_info": self.model_info,
            "GET /server_info": self.server_info,
            "GET /get_server_info": self.server_info,
            "GET /v1/loads": self.loads,
        }

    async def health(self, call: Call) -> web.Response:
        """It has to compute a token, so in a pause that keeps the scheduler it fails when its time is over."""
        scheduler = self.backend.scheduler
        deadline = asyncio.get_running_loop().time() + self.health_timeout
        while scheduler.paused or (self.backend.gate.paused and not scheduler.live):
            if asyncio.get_running_loop().time() > deadline:
                return web.Response(status=503)
            await asyncio.sleep(0.001)
        return web.Response()

    async def ready(self, call: Call) -> web.Response:
        return web.Response(status=503 if self.backend.gate.paused else 200)

    async def model_info(self, call: Call) -> web.Response:
        path = self.backend.model_path
        return answer(
            {
                "model_path": path,
                "served_model_name": path,
                "tokenizer_path": path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.backend.weight_version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
            }
        )

    async def server_info(self, call: Call) -> web.Response:
        started = {"model_path": self.backend.model_path, "context_length": self.backend.context_tokens}
        return answer({**self.args, **started, "version": self.version, "frontend": "python", "internal_states": [{}]})

    async def loads(self, call: Call) -> web.Response:
        scheduler = self.backend.scheduler
        used = sum(len(request.prompt) + len(request.output_ids) for request in scheduler.running)
        size = scheduler.cache.max_tokens
        load = {
            "timestamp": 0.0,
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": size,
            "token_usage": used / size,
            "cache_hit_rate": scheduler.cached_tokens / max(scheduler.cached_tokens + scheduler.prefill_tokens, 1),
            "total_prefill_uncached_tokens": scheduler.prefill_tokens,
        }
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return answer(
            {"timestamp": now, "version": self.version, "accelerator": None, "num_accelerators": 1, "loads": [load]}
        )
