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
    try:
        reply = await worker.post("/generate", body, seconds=_SECONDS)
        *_, problem = read_tokens(reply, reply["meta_info"], vocab_size)
        if not problem:
            return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    except Refused as refused:
        problem = str(refused)
    except UNREADABLE:
        problem = f"no tokens can be read in {str(reply)[:300]}"
    raise ConfigError(f"{worker.url}: {problem}")
