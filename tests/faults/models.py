"""A model with random weights for the local engine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.faults.world import CHAT


def save_model(path: Path, seed: int = 0) -> None:
    """A few thousand weights; its context is shorter than the limits of an episode ask for."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=CHAT.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,  # spread logits, so that other weights sample other tokens
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
