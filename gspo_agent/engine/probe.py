"""Probe: what a server is asked before it is trusted, under the very options that it runs with."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from gspo_agent.engine.reply import UNREADABLE, read_tokens
from gspo_agent.engine.request import PLAIN
from gspo_agent.engine.worker import Refused, Worker
from gspo_agent.errors import ConfigError

_SECONDS = 120.0


async def probe(
    worker: Worker,
    token_ids: Sequence[int],
    count: int = 4,
    temperature: float = 1.0,
    *,
    vocab_size: int | None = None,
    adapter: str | None = None,
) -> tuple[list[int], list[float]]:
    """What it samples after `token_ids`, and the logprobs of that. Raises ConfigError where not every token comes with
    its logprob, and Unavailable."""
    body: dict[str, Any] = {
        "rid": f"probe{secrets.token_hex(8)}~0~",
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True, **PLAIN},
        "return_logprob": True,
        "extra_key": f"probe {secrets.token_hex(8)}",
    }
    if adapter is not None:
        body["lora_path"] = adapter
    ids: Sequence[int] = []
    logprobs: Sequence[float] = []
    try:
        reply = await worker.post("/generate", body, seconds=_SECONDS)
        ids, logprobs, problem = read_tokens(reply, reply["meta_info"], vocab_size)
    except Refused as refused:
        problem = str(refused)
    except UNREADABLE:
        problem = f"no tokens can be read in {str(reply)[:300]}"
    if problem:
        raise ConfigError(f"{worker.url}: {problem}")
    return list(ids), list(logprobs)
