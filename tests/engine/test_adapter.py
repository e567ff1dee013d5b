"""Low-rank adapters: what they compute, and what of them is written and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from gspo_agent.engine.adapter import adapt, adapter_of, base_of, is_adapter, load_adapter, save_adapter
from gspo_agent.engine.base import Sampling
from gspo_agent.engine.local import LocalEngine
from gspo_agent.engine.model import load_model, sizes
from gspo_agent.engine.publish import publish
from gspo_agent.errors import ConfigError, EngineError
from gspo_agent.learner_config import LoRAConfig
from tests.engine.models import qwen3, scored, weights_of

LORA = LoRAConfig(rank=4, alpha=8.0)
IDS = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    qwen3().save_pretrained(path)
    return path


def trained(base: Path, seed: int = 0, lora: LoRAConfig = LORA) -> PreTrainedModel:
    """Whose adapter is as after some steps."""
    model = load_model(base, lora)
    torch.manual_seed(seed)
    for tensor in adapter_of(model).values():
        tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return model


def written(model: PreTrainedModel, base: Path, directory: Path, lora: LoRAConfig = LORA) -> Path:
    directory.mkdir()
    save_adapter(model, lora, str(base), directory)
    return directory


def test_until_it_is_trained_a_model_with_an_adapter_is_what_it_was_and_only_the_adapter_is_trained(base: Path) -> None:
    model = load_model(base, LORA)
    assert torch.equal(scored(model, [IDS], 1.0)[0], scored(qwen3(), [IDS], 1.0)[0])
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learned == adapter_of(model).keys()
    assert len(learned) == 2 * 7 * 2
    assert qwen3().state_dict().keys() == model.state_dict().keys() - learned
    again, other = load_model(base, LORA), load_model(base, LORA, seed=1)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(model.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(model.state_dict()[name], other.state_dict()[name])


def test_what_is_written_has_pefts_names_and_comes_back_beside_its_model_or_merged_into_it(
    base: Path, tmp_path: Path
) -> None:
    model = trained(base)
    directory = written(model, base, tmp_path / "adapter")
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["target_modules"] == LORA.targets
    found = load_file(directory / "adapter_model.safetensors")
    down = found["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    up = found["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert (down.shape, up.shape) == ((4, 96), (64, 4))

    expected = scored(model, [IDS], 1.0)[0]
    assert (expected - scored(qwen3(), [IDS], 1.0)[0]).abs().max() > 0.1
    beside = load_model(base, LORA)
    load_adapter(beside, directory)
    assert torch.equal(scored(beside, [IDS], 1.0)[0], expected)
    merged = load_model(directory)
    assert merged.state_dict().keys() == qwen3().state_dict().keys()
    assert torch.allclose(scored(merged, [IDS], 1.0)[0], expected, atol=1e-5)
    weight = "model.layers.1.mlp.down_proj.weight"
    assert torch.allclose(merged.state_dict()[weight] - qwen3().state_dict()[weight], 2.0 * up @ down, atol=1e-6)
    assert sizes(directory) == sizes(base)
    assert (is_adapter(directory), is_adapter(base), base_of(directory), base_of(base)) == (True, False, base, base)


def test_tied_layers_and_biases_stay_what_they_are(tmp_path: Path) -> None:
    qwen3(attention_bias=True).save_pretrained(tmp_path)
    model = load_model(tmp_path, LoRAConfig(targets=["q_proj", "lm_head"]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    model.lm_head.lora_B.weight.data.normal_()
    assert not torch.allclose(scored(model, [IDS], 1.0)[0], scored(qwen3(attention_bias=True), [IDS], 1.0)[0])


def test_what_does_not_fit_is_named_with_the_remedy(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.lora.targets names 'query', .*there are down_proj, .*v_proj"):
        adapt(qwen3(), LoRAConfig(targets=["q_proj", "query"]))
    directory = written(trained(base), base, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"of another shape: .*lora_A.weight is \(4, 96\) there and \(2, 96\) here"):
        load_adapter(load_model(base, LoRAConfig(rank=2)), directory)
    with pytest.raises(ConfigError, match=r"lora_A.weight is \(4, 96\) there and missing here; see learner.lora"):
        load_adapter(load_model(base, LoRAConfig(rank=4, targets=["q_proj"])), directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ConfigError, match="use_dora"):
        load_model(directory)
    (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone"}))
    with pytest.raises(ConfigError, match=r"the model '/gone', which .* is an adapter of, is not there; correct"):
        load_model(directory)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(directory)


async def test_the_local_engine_samples_with_the_adapter_that_was_published(base: Path) -> None:
    engine = LocalEngine(base, lora=LORA)
    try:
        for version in (1, 2):
            model = trained(base, version)
            await publish(weights_of(model, version), engine)
            completion = await engine.generate(IDS, Sampling(40, seed=version), request_id=f"{version}")
            (segment,) = completion.segments
            ids = [*IDS, *(int(token) for token in segment.token_ids)]
            expected = scored(model, [ids], 1.0)[0][len(IDS) - 1 :]
            assert segment.weight_version == version
            assert torch.allclose(torch.tensor(segment.logprobs), expected, atol=1e-5)
        with pytest.raises(EngineError, match="do not fit"):
            await publish(weights_of(qwen3(), 3), engine)
    finally:
        await engine.close()
