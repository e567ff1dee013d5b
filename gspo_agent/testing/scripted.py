"""ScriptedEngine: an engine whose every token is known beforehand, and that can be cut, failed and updated at will."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np

from gspo_agent.engine.base import Completion, FinishReason, Sampling, Weights
from gspo_agent.errors import EngineError
from gspo_agent.quota import Quota
from gspo_agent.trajectory import Segment

Answer = Callable[[Sequence[int], int], Sequence[int]]
"""(tokens up to where the turn begins, seed) -> the whole turn, stop token included."""


class ScriptedEngine:
    """Implements `gspo_agent.engine.base.Engine`. A turn is what `answer` gives for (prompt, seed), and the logprob of
    a token depends on (seed, position, token): a request that goes on after a cut gets what an uncut one would have.

    It refuses a prompt whose begun turn is not what it would have sampled itself, so a client that loses, repeats or
    edits a sampled token is found out at once.

    >>> engine = ScriptedEngine(lambda prompt, seed: chat.turn("hello"), turn_mark=ByteChat.ASSISTANT)
    """

    def __init__(
        self,
        answer: Answer,
        *,
        turn_mark: int = 258,
        name: str = "policy",
        vocab_size: int = 264,
        context_tokens: int = 1 << 20,
        weight_version: int = 0,
        chunk: int = 16,
        delay: float = 0.0,
        quota: Quota | None = None,
    ) -> None:
        """
        Args:
            turn_mark: The token after which a turn begins; ByteChat.ASSISTANT.
            chunk: Tokens between two looks at pause, abort and the weight version.
            delay: Seconds per chunk.
        """
        self.name, self.vocab_size, self.context_tokens = name, vocab_size, context_tokens
        self.weight_version, self.turn = weight_version, quota or nullcontext()
        self.requests: list[tuple[str, int, int]] = []
        """(request id, first position, tokens delivered), in the order in which they ended."""
        self.cut_at: set[int] = set()
        """Absolute positions before which a request is cut, once each per request that reaches them."""
        self.hold_at: int | None = None
        """Absolute position at which every request waits until it is aborted or this is None again."""
        self.held: set[str] = set()
        """Ids of the requests that wait at `hold_at`."""
        self.fail_next = 0
        """How many of the next requests raise EngineError."""
        self.on_tokens: Callable[[str, int, int, int], None] | None = None
        """Hears of every chunk as it is sampled: request id, first position, tokens, weight version."""
        self._answer, self._mark, self._chunk, self._delay = answer, turn_mark, chunk, delay
        self._running = asyncio.Event()
        self._running.set()
        self._aborted: set[str] = set()
        self._live: set[str] = set()
        self._ended: set[str] = set()
        self._sampled: dict[str, int] = {}

    def stats(self) -> dict[str, int]:
        """What the requests that ended have brought; no prompt is computed."""
        counts = {"tokens": sum(count for _, _, count in self.requests), "prefill_tokens": 0, "cached_tokens": 0}
        return {**counts, "running": len(self._live), "waiting": 0}

    async def open(self) -> None:
        return None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        if request_id in self._live or request_id in self._ended:
            raise EngineError(f"request id {request_id!r} is used twice")
        if self.fail_next > 0:
            self.fail_next -= 1
            raise EngineError(f"scripted failure of {request_id}")
        self._live.add(request_id)
        try:
            completion = await self._generate(list(token_ids), sampling, request_id)
        finally:
            self._live.discard(request_id)
            self._sampled.pop(request_id, None)
            self._aborted.discard(request_id)
            self.held.discard(request_id)
        self._ended.add(request_id)
        self.requests.append((request_id, len(token_ids), sum(map(len, completion.segments))))
        return completion

    def unjournaled(self) -> dict[str, int]:
        """Request id -> tokens sampled so far, of every request in flight that has some."""
        return dict(self._sampled)

    async def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._aborted.add(request_id)

    async def clear(self, prefix: str) -> None:
        self._aborted |= {request_id for request_id in self._live if request_id.startswith(prefix)}

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def release(self) -> None:
        return None

    async def update_weights(self, weights: Weights) -> None:
        self.weight_version = weights.version

    async def close(self) -> None:
        return None

    async def _generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        seed = sampling.seed or 0
        rest = self._rest(token_ids, seed)[: sampling.max_new_tokens]
        start = len(token_ids)
        segments: list[Segment] = []
        done = 0
        while done < len(rest):
            await self._turn_of_engine(request_id)
            position = start + done
            if request_id in self._aborted or (done and position in self.cut_at):
                return Completion(tuple(segments), "abort")
            if self.hold_at is not None and position >= self.hold_at:
                self.held.add(request_id)
                await asyncio.sleep(0.001)
                continue
            self.held.discard(request_id)
            size = min(self._chunk, len(rest) - done)
            limits = [p - position for p in (*self.cut_at, *([] if self.hold_at is None else [self.hold_at]))]
            size = min([size, *(limit for limit in limits if limit > 0)])
            part = rest[done : done + size]
            logprobs = [scripted_logprob(seed, position + n, token) for n, token in enumerate(part)]
            if self.on_tokens is not None:
                self.on_tokens(request_id, position, size, self.weight_version)
            segment = Segment(part, self.name, logprobs, self.weight_version)
            if segments and segment.continues(segments[-1]):
                segments[-1] = segments[-1].join(segment)
            else:
                segments.append(segment)
            done += size
            self._sampled[request_id] = done
        reason: FinishReason = "stop" if rest and rest[-1] in sampling.stop_token_ids else "length"
        return Completion(tuple(segments), reason)

    async def _turn_of_engine(self, request_id: str) -> None:
        await asyncio.sleep(self._delay)
        # Woken by either of two things, so there is no one event to wait for.
        while not self._running.is_set() and request_id not in self._aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def _rest(self, token_ids: list[int], seed: int) -> list[int]:
        """What is left of the turn that the prompt has begun."""
        if self._mark not in token_ids:
            raise EngineError(f"the prompt has no turn mark {self._mark}")
        begin = len(token_ids) - token_ids[::-1].index(self._mark)
        turn = list(self._answer(token_ids[:begin], seed))
        begun = token_ids[begin:]
        if turn[: len(begun)] != begun:
            raise EngineError(f"the turn was begun with {begun}, which is not what was sampled: {turn[: len(begun)]}")
        if len(begun) == len(turn):
            raise EngineError("asked to go on after the end of the turn")
        return turn[len(begun) :]


def scripted_logprob(seed: int, position: int, token: int) -> float:
    """Between -2 and 0, the same for the same arguments in every process."""
    return -(zlib.crc32(np.array([seed, position, token], np.int64).tobytes()) % 2000) / 1000
