"""Small random models, and the log-probabilities that a learner would compute for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gspo_agent.engine.base import Weights

VOCAB = 96


def qwen3(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    options: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**options | changes)).eval()


def weights_of(model: PreTrainedModel, version: int) -> Weights:
    return Weights(version, None, lambda: model.state_dict().items())


@torch.no_grad()
def scored(model: PreTrainedModel, rows: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]:
    """Per row [T - 1]: the logprob of every token but the first, from one right-padded forward pass."""
    width = max(len(row) for row in rows)
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logprobs = torch.log_softmax(model(input_ids=padded, attention_mask=mask).logits.float() / temperature, dim=-1)
    chosen = logprobs[:, :-1].gather(2, padded[:, 1:, None])[..., 0]
    return [values[: len(row) - 1] for values, row in zip(chosen, rows, strict=True)]
