from __future__ import annotations

import numpy as np
import pytest
import torch

from gspo_agent.engine.sampler import draw, uniforms


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    seeds, positions = [3, 2**64 - 1, -5, 3, 0], [0, 17, 17, 1, 0]
    together = uniforms(seeds, positions)
    assert [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)] == together.tolist()
    assert len(set(together.tolist())) == 5
    # Frozen: a journal that is resumed by a later release must draw the same.
    assert uniforms([0, 1], [0, 7]).tolist() == pytest.approx([1.1102230246251565e-16, 0.5826782041110662], abs=1e-15)


def test_uniforms_are_uniform_along_seeds_and_along_positions() -> None:
    for seeds, positions in ((range(50_000), [9] * 50_000), ([9] * 50_000, range(50_000))):
        values = uniforms(list(seeds), list(positions))
        assert 0 < values.min() < values.max() < 1
        counts = np.histogram(values, bins=50, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 95  # chi-square with 49 degrees of freedom, p = 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -20.0]])
    for temperature in (1.0, 0.5):
        expected = torch.softmax(logits[0] / temperature, 0).numpy()
        tokens, logprobs = draw(
            logits.expand(40_000, -1), [temperature] * 40_000, uniforms(list(range(40_000)), [3] * 40_000)
        )
        np.testing.assert_allclose(np.bincount(tokens, minlength=5) / 40_000, expected, atol=0.01)
        np.testing.assert_allclose(np.exp(logprobs), expected[tokens], rtol=1e-5)


def test_zero_temperature_takes_the_best_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    tokens, logprobs = draw(logits, [0.0, 0.0, 2.0], np.array([0.999, 0.999, 0.999]))
    assert tokens == [1, 0, 2]
    expected = [torch.log_softmax(row, 0)[token].item() for row, token in zip(logits[:2], tokens, strict=False)]
    assert logprobs == pytest.approx([*expected, torch.log_softmax(logits[2] / 2, 0)[2].item()], abs=1e-6)


@pytest.mark.parametrize("uniform", [2.0**-53, 1 - 2.0**-53])
def test_an_impossible_token_is_never_drawn(uniform: float) -> None:
    logits = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 2, 5]] = float("-inf")
    tokens, _ = draw(logits, [1.0] * 1000, np.full(1000, uniform))
    assert set(tokens) == {1 if uniform < 0.5 else 4}
