"""Log-probabilities of chosen tokens, without a float32 tensor of [all positions, vocabulary].

The output layer runs only where a token is wanted, over slices that are computed again in the backward pass, so that
one slice of logits is alive at a time. Softmax is float32 whatever the model's dtype: a bfloat16 logprob between -1 and
-2 moves in steps of 0.008, which alone decides the clip of a short trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_SLICE = 1 << 24  # logits alive at once; 64 MiB as float32


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """[N] float32 log softmax(logits / temperature) at `token_ids`.

    Args:
        logits: [N, V] of any float dtype.
        token_ids: [N]
        temperature: the one that the tokens were sampled at.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -functional.cross_entropy(scaled, token_ids, reduction="none")


class Scorer:
    """Scores tokens with any causal language model of transformers.

    Most models are a base and a linear output layer; where the two do not reproduce the model's own logits (soft
    capping, scaling), which is tried once on a few tokens, the logits of every position are computed.
    """

    def __init__(self, model: nn.Module, temperature: float, *, slice_logits: int = _SLICE) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: the learner scores sampled tokens, so it must be above 0")
        self.model, self.temperature, self.slice_logits = model, temperature, slice_logits
        self._base, self._head = _split(model)

    def __call__(self, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """[B, T] float32 logprobs of `targets` where `mask`, 0 elsewhere; with a graph even where nothing is chosen.

        Args:
            inputs: [B, T] token ids, padded on the right; position t predicts `targets[:, t]`.
            targets: [B, T] token ids.
            mask: [B, T] bool
        """
        chosen = targets[mask]
        if self._base is None or self._head is None:
            values = token_logprobs(self._logits(inputs)[mask], chosen, self.temperature)
        else:
            values = self._score(self._base(input_ids=inputs, use_cache=False).last_hidden_state[mask], chosen)
        return torch.zeros(mask.shape, device=values.device).masked_scatter(mask, values)

    def _score(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[N] from hidden states [N, D]."""
        head = self._head
        assert head is not None

        def score(hidden: Tensor, token_ids: Tensor) -> Tensor:
            return token_logprobs(head(hidden), token_ids, self.temperature)

        size = max(1, self.slice_logits // head.weight.shape[0])
        if len(hidden) <= size:
            return score(hidden, token_ids)
        slices = zip(torch.split(hidden, size), torch.split(token_ids, size), strict=True)
        return torch.cat([checkpoint(score, *part, use_reentrant=False) for part in slices])

    def _logits(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=inputs, use_cache=False).logits
        return logits


@torch.no_grad()
def _split(model: Any) -> tuple[Callable[..., Any] | None, nn.Linear | None]:
    """(base, output layer) where together they give the model's logits, else (None, None)."""
    base, head = getattr(model, model.base_model_prefix, None), model.get_output_embeddings()
    if not isinstance(base, nn.Module) or not isinstance(head, nn.Linear):
        return None, None
    few = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    own = model(input_ids=few, use_cache=False).logits
    ours = head(base(input_ids=few, use_cache=False).last_hidden_state)
    return (base, head) if torch.allclose(ours.float(), own.float(), rtol=1e-5, atol=1e-5) else (None, None)
