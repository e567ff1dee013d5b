"""Continuous batching on one thread: requests in, tokens out, one forward pass at a time."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gspo_agent.engine.base import Completion, FinishReason, Sampling, Weights
from gspo_agent.engine.kv_buffer import KVBuffer
from gspo_agent.engine.prefix_cache import BLOCK, Entry, PrefixCache
from gspo_agent.engine.sampler import draw, uniforms
from gspo_agent.errors import ConfigError, EngineError
from gspo_agent.trajectory import Segment

_PREFILL_TOKENS = 2048  # of one forward pass; more is no faster on a CPU and takes more memory
_PATIENCE = 8  # decoding steps that a waiting request lets pass for company in its prefill


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` on its way."""

    id: str
    token_ids: list[int]
    """The prompt, and behind it what has been sampled."""
    sampling: Sampling
    seed: int
    max_length: int
    """Tokens at which it ends, from `max_new_tokens` or the context."""
    prompt_length: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)

    def completion(self, author: str) -> Completion:
        """What came of it, one segment per weight version."""
        assert self.finish_reason is not None
        sampled, versions = self.token_ids[self.prompt_length :], np.array(self.versions)
        cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(sampled)] if sampled else []
        segments = (
            Segment(sampled[a:b], author, self.logprobs[a:b], self.versions[a]) for a, b in itertools.pairwise(cuts)
        )
        return Completion(tuple(segments), self.finish_reason)


class Decoder:
    """A model, the requests that it is working on, and those that wait. Not thread-safe: one thread owns it."""

    def __init__(self, model: PreTrainedModel, *, weight_version: int, max_running: int, cache_bytes: int) -> None:
        self.model = model
        self.weight_version = weight_version
        self.max_running = max_running
        self.prefixes = PrefixCache(cache_bytes)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = {"steps": 0, "tokens": 0, "prefill_tokens": 0, "cached_tokens": 0}
        self._kv = KVBuffer(_num_layers(model))
        self._impatience = 0
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed it in 5.24 and warns about the old name.
        self._options: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": self._kv}
        if "logits_to_keep" in parameters:
            self._options["logits_to_keep"] = 1

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admits whom it can and samples one token for everyone; returns the requests that ended."""
        ended: list[Request] = []
        if self._admits():
            self._impatience = 0
            while self.waiting and len(self.running) < self.max_running:
                self._admit(self._wave())
                ended += self._retire()
        if self.running:
            self._decode()
            ended += self._retire()
        if any(request.error for request in ended):
            # What is not a number would reach other rows through masked columns: zero times it is not zero.
            self._start_over()
            self._kv.clear()
        return ended

    @torch.inference_mode()
    def abort(self, request_id: str) -> Request | None:
        """Takes a request out and returns it; None where there is no such request."""
        for request in (*self.running, *self.waiting):
            if request.id == request_id:
                request.finish_reason = "abort"
                if request in self.waiting:
                    self.waiting.remove(request)
                else:
                    self._retire()
                return request
        return None

    def drop_all(self) -> list[Request]:
        """Forgets every request and all keys and values; returns the requests."""
        dropped = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self._kv.clear()
        self.prefixes.clear()
        return dropped

    @torch.no_grad()
    def update_weights(self, weights: Weights) -> None:
        """Copies new weights in; running requests are prefilled again, since their keys and values are of the old."""
        own, new = self.model.state_dict(), dict(weights.tensors())
        # Tied parameters have several names, of which one is enough.
        covered = {own[name].data_ptr() for name in new if name in own}
        problems = [f"{name} is not in the model" for name in new if name not in own]
        problems += [f"{name} is missing" for name, p in self.model.named_parameters() if p.data_ptr() not in covered]
        problems += [
            f"{name} has shape {tuple(tensor.shape)}, the model's {tuple(own[name].shape)}"
            for name, tensor in new.items()
            if name in own and tensor.shape != own[name].shape
        ]
        if problems:
            raise EngineError(f"weights {weights.version} do not fit the engine's model: {'; '.join(problems[:3])}")
        for name, tensor in new.items():
            own[name].copy_(tensor)
        self.weight_version = weights.version
        self._start_over()

    def _start_over(self) -> None:
        """Sends the running requests back to the queue's front, to be prefilled with nothing that was computed yet."""
        self.prefixes.clear()
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    def _admits(self) -> bool:
        """Whether now is the time for a prefill: small ones cost nearly as much as large ones."""
        ready = min(len(self.waiting), self.max_running - len(self.running))
        self._impatience += ready > 0
        return ready > 0 and (ready >= len(self.running) // 4 or self._impatience > _PATIENCE)

    def _wave(self) -> list[_Admission]:
        """Those of the waiting that can be prefilled together.

        Whoever would compute the same block as another of the wave stays back: after the wave the block is known.
        """
        wave: list[_Admission] = []
        kept: deque[Request] = deque()
        blocks: set[bytes] = set()
        while self.waiting and len(wave) + len(self.running) < self.max_running:
            request = self.waiting.popleft()
            token_ids = np.array(request.token_ids, np.int32)
            entry, known = self.prefixes.find(token_ids)
            next_block = (known // BLOCK + 1) * BLOCK
            key = token_ids[:next_block].tobytes()
            if key in blocks and len(token_ids) >= next_block:
                kept.append(request)
                continue
            blocks.add(key)
            # The last token is always computed: its logits are what is wanted.
            wave.append(_Admission(request, token_ids, entry, min(known, len(token_ids) - 1)))
        self.waiting.extendleft(reversed(kept))
        return wave

    def _admit(self, wave: list[_Admission]) -> None:
        width = max(len(admission.token_ids) for admission in wave)
        num_live = len(self.running)
        self._kv.reserve(num_live + len(wave), width, live_rows=num_live, live_width=self._live_width())
        for part in _parts(wave):
            first = len(self.running)
            new = max(admission.unknown for admission in part)
            self.running += [admission.request for admission in part]
            columns = np.zeros((len(part), new), np.int64)
            for row, admission in enumerate(part):
                length = len(admission.token_ids)
                columns[row, max(0, new - length) :] = admission.token_ids[-new:]
                # Beside what it lacks, a row computes again what makes the pass rectangular.
                copied = min(admission.known, max(0, length - new))
                if copied and admission.entry is not None:
                    self._kv.write(first + row, length, admission.entry.tensors, copied)
                self.counts["prefill_tokens"] += length - copied
                self.counts["cached_tokens"] += copied
            logits = self._forward(torch.from_numpy(columns), first, [len(a.token_ids) for a in part])
            for row, admission in enumerate(part, start=first):
                if admission.unknown >= BLOCK:
                    self.prefixes.put(admission.token_ids, self._kv.read(row, len(admission.token_ids)))
            self._append(first, logits)

    def _decode(self) -> None:
        num_live = len(self.running)
        self._kv.reserve(num_live, 0, live_rows=num_live, live_width=self._live_width())
        self._kv.end += 1
        last = torch.tensor([[request.token_ids[-1]] for request in self.running])
        self._append(0, self._forward(last, 0, [len(request.token_ids) for request in self.running]))
        self.counts["steps"] += 1

    def _forward(self, token_ids: Tensor, first: int, lengths: list[int]) -> Tensor:
        """Logits [N, V] after the last column of N rows from `first` on; `lengths` count the new columns too."""
        num_rows, new = token_ids.shape
        width, device = max(lengths), self.model.device
        self._kv.show(first, first + num_rows, width, new)
        length = torch.tensor(lengths)[:, None]
        position_ids = (length + torch.arange(-new, 0)).clamp_(min=0)
        mask = torch.arange(width, 0, -1) <= length
        output = self.model(
            input_ids=token_ids.to(device),
            attention_mask=mask.to(device),
            position_ids=position_ids.to(device),
            use_cache=True,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _append(self, first: int, logits: Tensor) -> None:
        """Samples one token for each running request from `first` on that has a row of logits."""
        requests = self.running[first:]
        uniform = uniforms([r.seed for r in requests], [len(r.token_ids) for r in requests])
        tokens, logprobs = draw(logits, [r.sampling.temperature for r in requests], uniform)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if not logprob > -np.inf:
                request.error = f"weights {self.weight_version} give {logprob} as the log-probability of a token"
                continue
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.weight_version)
            if token in request.sampling.stop_token_ids:
                request.finish_reason = "stop"
            elif len(request.token_ids) >= request.max_length:
                request.finish_reason = "length"
            self.counts["tokens"] += 1

    def _retire(self) -> list[Request]:
        """Takes out who ended, keeps their keys and values for who continues them, and closes the gaps."""
        gone = [row for row, r in enumerate(self.running) if r.finish_reason or r.error]
        if not gone:
            return []
        ended = [self.running[row] for row in gone]
        width = self._live_width()
        for row, request in zip(gone, ended, strict=True):
            if not request.error:
                # The last token was sampled, but never shown to the model.
                token_ids = np.array(request.token_ids[:-1], np.int32)
                self.prefixes.put(token_ids, self._kv.read(row, len(token_ids)))
        num_left = len(self.running) - len(gone)
        holes = [row for row in gone if row < num_left]
        if holes:
            taken = set(gone)
            movers = [row for row in range(num_left, len(self.running)) if row not in taken]
            self._kv.move(movers, holes, width)
            for mover, hole in zip(movers, holes, strict=True):
                self.running[hole] = self.running[mover]
        del self.running[num_left:]
        return ended

    def _live_width(self) -> int:
        """Columns in use: of every running request the last token is not among them yet."""
        return max((len(request.token_ids) - 1 for request in self.running), default=0)


def _num_layers(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    foreign = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if foreign or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{type(model).__name__} keeps more than keys and values ({', '.join(sorted(foreign)) or 'a state'}); "
            "the local engine cannot batch it: use engine.kind = 'sglang'"
        )
    return int(config.num_hidden_layers)


@dataclass(slots=True, eq=False)
class _Admission:
    request: Request
    token_ids: NDArray[np.int32]
    entry: Entry | None
    known: int

    @property
    def unknown(self) -> int:
        return len(self.token_ids) - self.known


def _parts(wave: list[_Admission]) -> Iterator[list[_Admission]]:
    """Splits a wave into nearly rectangular forward passes of bounded size, most work first."""
    part: list[_Admission] = []
    for admission in sorted(wave, key=lambda admission: -admission.unknown):
        columns = part[0].unknown if part else 0
        if part and ((len(part) + 1) * columns > _PREFILL_TOKENS or admission.unknown * 4 < columns * 3 - 16):
            yield part
            part = []
        part.append(admission)
    yield part
