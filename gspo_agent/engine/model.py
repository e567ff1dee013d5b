"""Reading a model from its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gspo_agent.engine.adapter import adapt, base_of, is_adapter, merge
from gspo_agent.errors import ConfigError, boundary
from gspo_agent.learner_config import LoRAConfig


def sizes(path: str | Path) -> tuple[int, int]:
    """(size of the vocabulary, tokens in the longest context), without reading a weight. Raises ConfigError."""
    with boundary(ConfigError, f"the configuration of model {str(path)!r} cannot be read"):
        text = AutoConfig.from_pretrained(str(base_of(Path(path)))).get_text_config()
        return int(text.vocab_size), int(text.max_position_embeddings)


def load_model(path: str | Path, lora: LoRAConfig | None = None, *, seed: int = 0) -> PreTrainedModel:
    """A causal language model in float32, from a directory or by its hub name; of an adapter's directory, the model
    that it is of with the adapter merged into it. With `lora`, frozen and with an adapter to be trained, drawn by
    `seed`.

    Raises ConfigError where it cannot be read, or where its files lack a weight: transformers would draw that one at
    random and go on.
    """
    path = Path(path)
    base = base_of(path)
    with boundary(ConfigError, f"model {str(base)!r} cannot be loaded as a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32, output_loading_info=True)
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(
            f"model {str(base)!r}: its files lack {len(missing)} weights, {missing[0]} first; copy the directory again"
        )
    if is_adapter(path):
        merge(model, path)
    if lora is not None:
        adapt(model, lora, seed)
    return model
