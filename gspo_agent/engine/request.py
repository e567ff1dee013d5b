"""One request as a server gets it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
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

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


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


def checked(token_ids: Sequence[int], sampling: Sampling, *, vocab_size: int, context_tokens: int) -> tuple[Any, int]:
    """The ids as an array, and how many tokens may follow them. Raises ValueError for what no server may see."""
    ids = np.ascontiguousarray(token_ids)
    if not len(ids):
        raise ValueError("an empty prompt; give at least one token")
    if ids.dtype.kind != "i":
        raise ValueError(f"token ids must be integers, these are {ids.dtype}")
    # One look for both bounds: as an unsigned number, a negative one is larger than any vocabulary. `argmax` goes a
    # shorter way through numpy than `max`.
    unsigned = ids.view(_UNSIGNED[ids.itemsize])
    if unsigned.item(unsigned.argmax()) >= vocab_size:
        place = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ValueError(f"token id {ids[place]} at position {place} is outside the vocabulary of {vocab_size}")
    if len(ids) >= context_tokens:
        raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {context_tokens}")
    if sampling.max_new_tokens < 1 or not 0 <= sampling.temperature < math.inf:
        raise ValueError(f"max_new_tokens must be at least 1, temperature finite and at least 0; given {sampling}")
    return ids, min(sampling.max_new_tokens, context_tokens - len(ids))
