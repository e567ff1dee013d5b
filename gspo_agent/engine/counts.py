"""Counts: what requests to servers came to, since the start of an engine."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from gspo_agent.engine.base import Completion
from gspo_agent.engine.reply import Reply, Source


class Counts:
    """tokens, prefill_tokens, cached_tokens; retries; discarded (tokens of aborts that came without their logprobs);
    rescued (tokens of streams that were cut); versions_from_spans, _reply, _dispatch, _adapter (requests, by where
    their tokens' versions are known from)."""

    def __init__(self) -> None:
        self.retries = self.rescued = 0
        self._tokens = self._prefill = self._cached = self._discarded = 0
        self._sources: Counter[Source] = Counter()

    def add(self, reply: Reply) -> Completion:
        """Counts it, and returns what is in it."""
        self._tokens += sum(map(len, reply.completion.segments))
        self._prefill += reply.prefill_tokens
        self._cached += reply.cached_tokens
        self._discarded += reply.discarded
        self._sources[reply.source] += 1
        return reply.completion

    def as_dict(self) -> dict[str, int]:
        return {
            "tokens": self._tokens,
            "prefill_tokens": self._prefill,
            "cached_tokens": self._cached,
            "retries": self.retries,
            "discarded": self._discarded,
            "rescued": self.rescued,
            **{f"versions_from_{source}": self._sources[source] for source in get_args(Source)},
        }
