"""One request as a server gets it."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from gspo_agent.engine.base import Sampling

PLAIN = {
    # Said, since a server may have other defaults: what is sampled from is what the logprobs are of.
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "skip_special_tokens": False,
    "no_stop_trim": True,
}

STREAM_INTERVAL = 16
"""Tokens of an increment."""


class Asked(NamedTuple):
    """What was asked of a server, and under which weights."""

    rid: str
    sampling: Sampling
    max_new_tokens: int
    author: str
    dispatched: int
    """The version of the server's weights at that moment."""
    vocab_size: int | None = None
    """Ids from there on are no tokens."""
    adapter: str | None = None
    """What the server calls the adapter that is to sample; None: its weights are all."""

    def body(self, token_ids: Any, *, namespace: str | None = None, stream: bool = False) -> bytes:
        """
        Args:
            token_ids: A list, or an array of numpy's.
            namespace: Requests share their cached prefixes within one only.
            stream: The reply comes in increments.
        """
        sampling = self.sampling
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": sampling.stop_token_ids,
            **PLAIN,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed % 2**63
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": token_ids,
            "sampling_params": params,
            "return_logprob": True,
        }
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if namespace is not None:
            body["extra_key"] = namespace
        if stream:
            body["stream"], params["stream_interval"] = True, STREAM_INTERVAL
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
