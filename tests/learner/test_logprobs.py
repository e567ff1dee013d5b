from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from gspo_agent.learner.logprobs import Scorer, token_logprobs
from tests.learner.models import VOCAB, qwen3
from tests.learner.oracles import CASES


def cohere() -> PreTrainedModel:
    """Its logits are scaled after the output layer."""
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.25,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return CohereForCausalLM(config).eval()


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    return GPT2LMHeadModel(config).eval()


def some_rows(rows: int = 3, length: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (rows, length + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:], torch.rand(rows, length, generator=draw) < 0.4


def test_the_temperature_oracle() -> None:
    given, expected = CASES["temperature_consistency"]["inputs"], CASES["temperature_consistency"]["expected"]
    logits, token = torch.tensor([given["logits"]]), torch.tensor([given["token"]])
    assert float(token_logprobs(logits, token, given["temperature"])) == pytest.approx(expected["tempered"], abs=1e-7)
    assert float(token_logprobs(logits, token, 1.0)) == pytest.approx(expected["raw"], abs=1e-7)


def test_softmax_is_float32_for_bfloat16_logits() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(5)
    exact = logits.double().log_softmax(-1)[ids, ids]
    values = token_logprobs(logits, ids, 1.0)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [qwen3, lambda: qwen3(tie=False), gpt2, cohere])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_the_log_softmax_of_the_models_own_logits(make: object, temperature: float) -> None:
    model = make()  # type: ignore[operator]
    inputs, targets, mask = some_rows()
    expected = (model(input_ids=inputs).logits.double() / temperature).log_softmax(-1).gather(-1, targets[..., None])
    values = Scorer(model, temperature)(inputs, targets, mask)
    torch.testing.assert_close(values.double(), expected.squeeze(-1).where(mask, 0.0), rtol=0, atol=2e-6)


def test_a_model_that_scales_its_logits_is_not_split_and_others_are() -> None:
    assert Scorer(cohere(), 1.0)._head is None
    assert Scorer(gpt2(), 1.0)._head is not None
    assert Scorer(qwen3(), 1.0)._head is not None


def test_slices_change_neither_values_nor_gradients() -> None:
    model = qwen3()
    inputs, targets, mask = some_rows()
    results = []
    for limit in (1 << 24, VOCAB * 3, 1):
        model.zero_grad()
        values = Scorer(model, 0.7, slice_logits=limit)(inputs, targets, mask)
        values.square().sum().backward()
        results.append((values.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    for values, gradients in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=0, atol=1e-6)
        for gradient, first in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(gradient, first, rtol=1e-3, atol=1e-4)


def test_right_padding_of_any_amount_changes_no_score() -> None:
    model = qwen3()
    inputs, targets, mask = some_rows()
    scorer = Scorer(model, 1.0)
    expected = scorer(inputs, targets, mask)
    for amount in (1, 7):
        padded = [torch.nn.functional.pad(tensor, (0, amount)) for tensor in (inputs, targets, mask)]
        torch.testing.assert_close(scorer(*padded)[:, : inputs.shape[1]], expected, rtol=0, atol=1e-6)


def test_nothing_chosen_still_reaches_every_parameter_with_a_zero_gradient() -> None:
    model = qwen3()
    inputs, targets, mask = some_rows()
    Scorer(model, 1.0)(inputs, targets, torch.zeros_like(mask)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_greedy_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        Scorer(qwen3(), 0.0)
