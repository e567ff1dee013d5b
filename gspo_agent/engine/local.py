"""LocalEngine: a transformers causal language model in this process, decoding in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from gspo_agent.background import off_loop
from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.engine.decoder import Decoder, Request
from gspo_agent.engine.model import load_model
from gspo_agent.errors import EngineError, boundary
from gspo_agent.learner_config import LoRAConfig
from gspo_agent.quota import Quota

Action = Callable[[], Any]


class LocalEngine:
    """Implements Engine with the model in this process.

    The event loop only hands over: requests and commands go to the thread in one queue, in order, and are obeyed
    between two decoding steps. What ended comes back once a step. The weights are a copy of the model's.

    >>> engine = LocalEngine("runs/calculator/checkpoints/step-12")
    >>> completion = await engine.generate(prompt_ids, Sampling(max_new_tokens=64), request_id="0.0.1/0")
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        *,
        name: str = "policy",
        lora: LoRAConfig | None = None,
        max_running: int = 128,
        threads: int = 1,
        weight_version: int = 0,
        device: str = "cpu",
        cache_bytes: int = 1 << 29,
        quota: Quota | None = None,
    ) -> None:
        """`model` is copied, or read in float32 from a directory; with `lora` it gets an adapter, whose weights are to
        come. `cache_bytes` bounds what is kept of prefixes."""
        own = _own(model, lora, device)
        self._decoder = Decoder(own, weight_version=weight_version, max_running=max_running, cache_bytes=cache_bytes)
        self.name, self.turn = name, quota or contextlib.nullcontext()
        self.vocab_size = int(cast(torch.nn.Embedding, own.get_input_embeddings()).num_embeddings)
        self.context_tokens: int = own.config.get_text_config().max_position_embeddings
        self._num_threads = threads
        self._thread: threading.Thread | None = None
        self._inbox: SimpleQueue[Action] = SimpleQueue()
        self._outgoing: list[Action] = []
        self._in_flight: dict[str, tuple[Request, asyncio.Future[Completion]]] = {}
        self._commands: set[asyncio.Future[None]] = set()
        self._paused = self._stopped = self._closed = False

    @property
    def weight_version(self) -> int:
        return self._decoder.weight_version

    def stats(self) -> dict[str, int]:
        """Counts since the start (steps, tokens, prefill_tokens, cached_tokens), and what runs and waits now."""
        return {
            **self._decoder.counts,
            "running": len(self._decoder.running),
            "waiting": len(self._decoder.waiting),
            "cache_bytes": self._decoder.prefixes.num_bytes,
        }

    def unjournaled(self) -> dict[str, int]:
        """Request id -> tokens sampled so far, of every request in flight. From any thread."""
        return {id: len(request.versions) for id, (request, _) in list(self._in_flight.items())}

    async def open(self) -> None:
        """Nothing to wait for: the thread begins with the first request."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continues `token_ids`, at most to the end of the context. Cancelling the call aborts the request."""
        request = self._request(token_ids, sampling, request_id)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._in_flight[request_id] = request, future
        self._send(lambda: self._decoder.add(request))
        try:
            return await future
        finally:
            if self._in_flight.get(request_id) == (request, future) and not self._closed:
                del self._in_flight[request_id]
                self._send(lambda: self._decoder.abort(request_id))

    async def abort(self, request_id: str) -> None:
        await self._command(lambda: self._abort(request_id))

    async def clear(self, prefix: str) -> None:
        await asyncio.gather(*(self.abort(id) for id in list(self._in_flight) if id.startswith(prefix)))

    async def pause(self) -> None:
        await self._command(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._command(lambda: self._set_paused(False))

    async def release(self) -> None:
        """Its memory stays: it is this process's own."""

    async def update_weights(self, weights: Weights) -> None:
        """Copies the tensors in between two decoding steps. What does not fit: EngineError, and nothing changed."""
        named = await off_loop(lambda: list(weights.tensors()))  # they may come from another process
        here = replace(weights, tensors=lambda: named)
        await self._command(lambda: self._decoder.update_weights(here))

    async def close(self) -> None:
        """Ends the thread within one decoding step; whoever still waits gets EngineError."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._inbox.put(self._stop)
            await asyncio.to_thread(self._thread.join)
        closed = EngineError(f"engine {self.name!r} was closed")
        for _, future in self._in_flight.values():
            _resolve(future, closed)
        for command in self._commands:
            _resolve(command, closed)
        self._in_flight.clear()

    # ---- on the event loop

    def _request(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> Request:
        def refuse(what: str) -> EngineError:
            return EngineError(f"engine {self.name!r}, request {request_id!r}: {what}")

        ids, length = np.asarray(token_ids), len(token_ids)
        if request_id in self._in_flight:
            raise refuse("a request with this id is in flight; ids must be unique")
        if not length:
            raise refuse("an empty prompt; give at least one token")
        if not (ids.min() >= 0 and ids.max() < self.vocab_size):
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise refuse(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if length >= self.context_tokens:
            raise refuse(f"a prompt of {length} tokens leaves no room in a context of {self.context_tokens}")
        if sampling.max_new_tokens < 1 or not 0 <= sampling.temperature < math.inf:
            raise refuse(f"max_new_tokens must be at least 1, temperature finite and at least 0; given {sampling}")
        return Request(
            request_id,
            ids.tolist(),
            sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_length=min(length + sampling.max_new_tokens, self.context_tokens),
        )

    async def _command(self, action: Action) -> None:
        """Has the thread run `action` between two steps and waits for it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands.add(future)
        self._send(lambda: self._run_command(action, future))
        try:
            await future
        finally:
            self._commands.discard(future)

    def _send(self, action: Action) -> None:
        """Queues `action`; all that one turn of the event loop queues reaches the thread together."""
        if self._closed:
            raise EngineError(f"engine {self.name!r} was closed")
        self._loop = asyncio.get_running_loop()
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(action)

    def _flush(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"engine-{self.name}", daemon=True)
            self._thread.start()
        for action in self._outgoing:
            self._inbox.put(action)
        self._outgoing.clear()

    def _settle(self, ended: list[Request]) -> None:
        for request in ended:
            known, future = self._in_flight.get(request.id, (None, None))
            # A cancelled call has left, and its id may belong to another by now.
            if known is not request or future is None:
                continue
            del self._in_flight[request.id]
            if request.error is None:
                _resolve(future, request.completion(self.name))
            else:
                _resolve(future, EngineError(f"engine {self.name!r}, request {request.id!r}: {request.error}"))

    # ---- in the thread

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        while not self._stopped:
            try:
                self._obey(wait=self._paused or not self._decoder.busy)
                if not (self._paused or self._stopped):
                    self._report(self._decoder.step())
            except Exception as error:  # any request may be the cause: all fail, none hangs, the next ones start afresh
                self._fail(error)

    def _obey(self, *, wait: bool) -> None:
        """Runs what has been queued; with `wait`, at least one thing."""
        while wait or not self._inbox.empty():
            self._inbox.get()()
            wait = False

    def _report(self, ended: list[Request]) -> None:
        if ended:
            self._call_loop(self._settle, ended)

    def _fail(self, error: Exception) -> None:
        dropped = self._decoder.drop_all()
        for request in dropped:
            request.error = f"{type(error).__name__}: {error}"
        self._report(dropped)

    def _run_command(self, action: Action, future: asyncio.Future[None]) -> None:
        try:
            with boundary(EngineError, f"engine {self.name!r}"):
                action()
        except EngineError as error:
            self._call_loop(_resolve, future, error)
        else:
            self._call_loop(_resolve, future, None)

    def _abort(self, request_id: str) -> None:
        request = self._decoder.abort(request_id)
        if request is not None:
            self._report([request])

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _stop(self) -> None:
        self._stopped = True

    def _call_loop(self, function: Callable[..., None], *args: Any) -> None:
        # A closed loop has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _own(model: PreTrainedModel | str | Path, lora: LoRAConfig | None, device: str) -> PreTrainedModel:
    """A copy that nobody else changes, ready to decode."""
    if isinstance(model, str | Path):
        own = load_model(model, lora)
    else:
        own = copy.deepcopy(model)
        own.zero_grad(set_to_none=True)
    own.to(torch.device(device))  # type: ignore[arg-type]
    own.requires_grad_(False)
    own.train(False)
    return own
