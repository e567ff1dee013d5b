"""Agreement: whether a server and the learner give the same tokens the same log-probabilities, once before a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_agent.engine.base import Sampled
from gspo_agent.errors import ConfigError

_FLOAT32 = 1e-3  # what kernels of full precision make of one model, with room to spare


def disagreement(
    sampled: Sampled, scored: Sequence[float], at_one: Sequence[float], *, temperature: float, dtype: str, bound: float
) -> str:
    """What to warn of; "" where they agree.

    Args:
        scored: The learner's logprobs of the same tokens, under the same weights, at `temperature`; `at_one`: at 1.
        dtype: The learner's.
        bound: Mean distance that is allowed. Where both compute in float32, 1e-3 is, if that is less.

    Raises ConfigError where the server leaves the temperature out of its logprobs, so that every ratio would be wrong.
    """
    found = np.asarray(sampled.logprobs, np.float64)
    distances = np.abs(found - scored)
    if not distances.size:
        return ""
    if dtype == sampled.precision == "float32":
        bound = min(bound, _FLOAT32)
    mean = float(distances.mean())
    if mean <= bound:
        return ""
    if temperature != 1 and float(np.abs(found - at_one).mean()) <= bound:
        raise ConfigError(
            f"{sampled.server} returns logprobs of temperature 1 for tokens that it sampled at {temperature:g}; start "
            "it without SGLANG_RETURN_ORIGINAL_LOGPROB, or set rollout.temperature = 1"
        )
    return (
        f"{sampled.server} and the learner differ by {mean:.3g} in the mean, {distances.max():.3g} at most, in the "
        f"log-probabilities of {distances.size} tokens under the same weights, more than {bound:g}: every ratio is "
        f"wrong by as much. The learner computes in {dtype}, the server in "
        f"{sampled.precision or 'what it does not say'}; compare dtype, quantization, attention backend and "
        "speculative decoding of both (learner.max_logprob_diff is what is allowed)"
    )
