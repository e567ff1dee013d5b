from __future__ import annotations

import numpy as np
import pytest

from gspo_agent.engine.base import Sampled
from gspo_agent.errors import ConfigError
from gspo_agent.monitor.agreement import disagreement

LOGPROBS = [-0.5, -1.0, -2.5, -0.1]


def said(distance: float, *, precision: str = "float32", dtype: str = "float32", bound: float = 0.02) -> str:
    scored = [value + distance for value in LOGPROBS]
    return disagreement(
        Sampled("http://a", precision, 1, [1, 2, 3, 4], LOGPROBS),
        scored,
        scored,
        temperature=1.0,
        dtype=dtype,
        bound=bound,
    )


def test_what_kernels_make_of_one_model_is_no_warning_at_the_precision_of_both() -> None:
    assert said(5e-4) == ""
    assert said(5e-3, precision="bfloat16") == ""
    assert said(5e-3, dtype="bfloat16") == ""
    assert said(5e-4, bound=1e-4)


def test_more_is_told_with_its_figures_and_what_to_compare() -> None:
    text = said(5e-3)
    assert text.startswith("http://a and the learner differ by 0.005 in the mean, 0.005 at most")
    assert "4 tokens under the same weights, more than 0.001" in text
    assert "more than 0.02" in said(0.3, precision="bfloat16 and fp8")
    assert "the server in bfloat16 and fp8" in said(0.3, precision="bfloat16 and fp8")
    assert "the server in what it does not say" in said(0.3, precision="")


def test_a_server_that_leaves_the_temperature_out_is_refused() -> None:
    sampled = Sampled("http://a", "float32", 1, [1, 2, 3, 4], LOGPROBS)
    scored = list(np.array(LOGPROBS) * 1.4)
    with pytest.raises(ConfigError, match=r"without SGLANG_RETURN_ORIGINAL_LOGPROB, or set rollout.temperature = 1"):
        disagreement(sampled, scored, LOGPROBS, temperature=0.7, dtype="float32", bound=0.02)


def test_nothing_sampled_is_nothing_to_say() -> None:
    assert disagreement(Sampled("a", "", 1, [], []), [], [], temperature=1.0, dtype="float32", bound=0.02) == ""
