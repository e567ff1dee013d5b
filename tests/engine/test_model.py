from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_agent.engine.model import load_model
from gspo_agent.errors import ConfigError
from tests.learner.models import qwen3, saved_qwen3


def test_a_model_is_read_in_float32(tmp_path: Path) -> None:
    loaded = load_model(saved_qwen3(tmp_path))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), qwen3().parameters(), strict=True))


def test_a_directory_that_lacks_a_weight_is_refused_instead_of_drawing_it_at_random(tmp_path: Path) -> None:
    path = saved_qwen3(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 weights, model.layers.0.mlp.up_proj.weight first"):
        load_model(path)


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        load_model(tmp_path)
