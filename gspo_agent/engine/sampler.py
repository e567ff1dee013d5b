"""Drawing tokens: one keyed uniform number per row, through the inverse of the row's own distribution."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def uniforms(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """[N] numbers strictly inside (0, 1), each a function of its (seed, position) alone: splitmix64, twice.

    No generator is kept, so neither the rest of the batch nor an interruption can change a draw.
    """
    key = _mix(np.array([seed & _MASK for seed in seeds], np.uint64) + _GOLDEN)
    bits = _mix(key ^ _mix(np.array(positions, np.uint64) * _GOLDEN + _GOLDEN))
    # 52 bits and a half: the largest is still below 1 in float64.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: Tensor, temperatures: list[float], uniform: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """One token per row and its log-probability under the distribution that it was drawn from.

    Args:
        logits: [N, V]
        temperatures: [N]; 0 takes the most likely token and reports its logprob at temperature 1.
        uniform: [N] from `uniforms`.

    Returns:
        [N] token ids and [N] float32 log-probabilities, log-softmax of logits / temperature.
    """
    scores = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        scores = scores / torch.tensor(divisors, device=scores.device)[:, None]
    logprobs = torch.log_softmax(scores, dim=-1)
    # float64, or the rounding of a long cumulative sum would reach the size of a rare token's probability.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(scores.device)[:, None] * cumulative[:, -1:]
    # The first sum that reaches the target: a token of probability zero adds nothing and is never the first.
    tokens = torch.searchsorted(cumulative, target)
    # Only where the sums are not numbers is there no such token; the logprob says so.
    tokens.clamp_(max=logits.shape[-1] - 1)
    if not all(temperatures):
        greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=scores.device)[:, None]
        tokens = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), tokens)
    chosen = logprobs.gather(1, tokens)
    return tokens[:, 0].tolist(), chosen[:, 0].tolist()
