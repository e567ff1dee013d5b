"""Reading a model from its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gspo_agent.errors import ConfigError, boundary


def sizes(path: str | Path) -> tuple[int, int]:
    """(size of the vocabulary, tokens in the longest context), without reading a weight. Raises ConfigError."""
    with boundary(ConfigError, f"the configuration of model {str(path)!r} cannot be read"):
        text = AutoConfig.from_pretrained(str(path)).get_text_config()
        return int(text.vocab_size), int(text.max_position_embeddings)


def load_model(path: str | Path) -> PreTrainedModel:
    """A causal language model in float32, from a directory or by its hub name.

    Raises ConfigError where it cannot be read, or where its files lack a weight: transformers would draw that one at
    random and go on.
    """
    with boundary(ConfigError, f"model {str(path)!r} cannot be loaded as a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, output_loading_info=True)
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(
            f"model {str(path)!r}: its files lack {len(missing)} weights, {missing[0]} first; copy the directory again"
        )
    return model
