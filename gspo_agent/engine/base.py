"""What an engine promises: token ids in, token ids with logprobs and weight versions out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from gspo_agent.trajectory import Segment

if TYPE_CHECKING:
    from torch import Tensor

Source = Callable[..., Any]
"""Calls a function of `sender.Sender` with further arguments in the process that has the weights, and blocks meanwhile:
`source(Sender.outline, version, max_bytes)`."""
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled. Only what keeps the reported logprob equal to the sampling probability."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; its logprobs are those of temperature 1."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """With a seed, the draw at absolute position t depends on (seed, t) and the distribution alone: a cut and a
    resumed request draws what an uncut one would have drawn."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request brought. `segments` hold sampled tokens only, in order, one per weight version met on the way;
    their `turn` is 0. The stop token, where there was one, is the last token."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    """"stop": a stop token was sampled. "length": `max_new_tokens` reached. "abort": cut; ask again with all ids."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one server of several sampled, for a comparison."""

    server: str
    precision: str
    """What it computes in, "" where it does not say."""
    weight_version: int
    token_ids: list[int]
    logprobs: list[float]


Comparison = Callable[[Sampled], Awaitable[bool]]
"""Compares what a server sampled with what it should have. False: it cannot now, other weights are there by now."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one version, in whatever form an engine can take them."""

    version: int
    path: Path | None
    """A directory with `config.json` and safetensors, or None where this version was not saved."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Named parameters, as in the model's `state_dict`."""
    source: Source | None = None
    """Brings them to servers without a file between, as long as they are there; None where nobody does."""


class Engine(Protocol):
    """A source of tokens. All coroutines run on one event loop; `generate` is called for many requests at once."""

    @property
    def name(self) -> str:
        """The author of the segments it makes."""
        ...

    @property
    def weight_version(self) -> int:
        """Of the weights that sample now."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """The most tokens that prompt and completion may have together."""
        ...

    @property
    def turn(self) -> AbstractAsyncContextManager[None]:
        """To be entered around a request: its turn at the engine's quota."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counts since the start, at least: tokens (sampled), prefill_tokens (of prompts, computed), cached_tokens (of
        prompts, known from before). And how many requests are running and waiting now."""
        ...

    async def open(self) -> None:
        """Returns when it can be asked; comes first, once. Raises ConfigError where it cannot work at all."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continues `token_ids`, which nobody else changes; where they go into JSON, take `list(token_ids)`.

        Waits while the engine is paused. Raises EngineError, never returns a guess.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends one request, whose `generate` returns what it has with "abort". An unknown id is ignored."""
        ...

    async def clear(self, prefix: str) -> None:
        """Aborts every request whose id begins with `prefix`, as those of a process that died."""
        ...

    async def pause(self) -> None:
        """Returns when no token is being computed; requests stay and wait."""
        ...

    async def resume(self) -> None: ...

    async def release(self) -> None:
        """In a pause: lets go of the memory that it computes in until the next `update_weights`, as far as it can."""
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Returns when every later token comes from `weights`. Requests in flight go on under them."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """What an engine may have beside: without it each request counts as having sampled all it was asked for."""

    def unjournaled(self) -> Mapping[str, int]:
        """Request id -> tokens sampled so far, of the requests in flight; what is missing has none. From any thread."""
        ...


@runtime_checkable
class Several(Protocol):
    """What an engine of several servers has beside."""

    def problems(self) -> Mapping[str, str]:
        """Server -> why it gets no requests, of those that get none."""
        ...

    async def compare_each(self, token_ids: Sequence[int], sampling: Sampling, compare: Comparison) -> None:
        """Gives what each server samples after `token_ids` to `compare`: those that get requests now, and from now on
        each that was away, before it gets requests. Raises ConfigError where its logprobs are incomplete."""
        ...
