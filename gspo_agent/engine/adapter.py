"""Adapter: low-rank updates of a model's linear layers (LoRA, arXiv:2106.09685), and their files as PEFT has them.

    W' = W + (alpha / rank) * B @ A,   A [rank, in], B [out, rank]

The model's own parameters keep their names, and those of the adapter stand beside them: `...q_proj.lora_A.weight`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from gspo_agent.errors import ConfigError, boundary
from gspo_agent.learner_config import LoRAConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's, before the names of a model that it has wrapped
_MORE = "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"
_KINDS = ".lora_A.weight", ".lora_B.weight"


class LowRankLinear(nn.Linear):
    """A linear layer with the weight (and bias) of another one, frozen, and a low-rank update beside it.

    B begins at zero: until the first update the model is what it was.
    """

    def __init__(self, layer: nn.Linear, config: LoRAConfig, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias  # the same, so that tied ones stay tied
        self.scale = config.alpha / config.rank
        down = torch.empty(config.rank, layer.in_features)
        nn.init.kaiming_uniform_(down, a=5**0.5, generator=generator)
        self.lora_A = _linear(down.to(layer.weight.device))
        self.lora_B = _linear(torch.zeros(layer.out_features, config.rank, device=layer.weight.device))

    def forward(self, input: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(input))
        return functional.linear(input, self.weight, self.bias) + self.scale * update


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def adapt(model: nn.Module, config: LoRAConfig, seed: int = 0) -> None:
    """Freezes a model and gives every linear layer that `config` names an adapter, drawn by `seed`.

    Raises ConfigError where a name fits no layer.
    """
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    last = {name: name.rpartition(".")[2] for name in linear}
    if missing := sorted(set(config.targets) - set(last.values())):
        raise ConfigError(
            f"learner.lora.targets names {missing[0]!r}, and no linear layer of the model is called so; there are "
            f"{', '.join(sorted(set(last.values())))}"
        )
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in linear.items():
        if last[name] in config.targets:
            model.set_submodule(name, LowRankLinear(layer, config, generator), strict=True)


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters, as the model names them."""
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(_KINDS)}


def save_adapter(model: nn.Module, config: LoRAConfig, base: str, directory: Path) -> None:
    """Writes its two files into a directory that is there.

    Args:
        base: Where the model lies that it is an adapter of.
    """
    tensors = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in adapter_of(model).items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(content, indent=1))


@torch.no_grad()
def load_adapter(model: nn.Module, directory: Path) -> None:
    """Reads an adapter into a model that has one. Raises ConfigError where it is of another shape."""
    own, found = adapter_of(model), _read(directory)
    differing = [name for name in own.keys() | found.keys() if _size(own, name) != _size(found, name)]
    if differing:
        name = min(differing)
        raise ConfigError(
            f"{directory} has an adapter of another shape: {name} is {_size(found, name)} there and "
            f"{_size(own, name)} here; see learner.lora"
        )
    for name, tensor in own.items():
        tensor.copy_(found[name])


@torch.no_grad()
def merge(model: nn.Module, directory: Path) -> None:
    """Adds an adapter's update to the weights of the model that it is of. Raises ConfigError where it does not fit."""
    config, found = _config(directory), _read(directory)
    with boundary(ConfigError, f"adapter {directory} does not fit its model"):
        for name in sorted(found):
            if name.endswith(_KINDS[0]):
                layer = name.removesuffix(_KINDS[0])
                update = found[layer + _KINDS[1]] @ found[name]
                model.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * update


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG_FILE).is_file()


def base_of(path: Path) -> Path:
    """The model that an adapter is of; a directory without one is its own. Raises ConfigError where it is not there."""
    if not is_adapter(path):
        return path
    base = Path(str(_config(path).get("base_model_name_or_path")))
    if not base.is_absolute():  # a hub name
        return base
    moved = path.resolve().parents[1] / base.name  # a run's own, as far as the run has been moved
    if found := next((place for place in (base, moved) if place.is_dir()), None):
        return found
    raise ConfigError(
        f"the model {str(base)!r}, which {path} is an adapter of, is not there; correct base_model_name_or_path in "
        f"{path / CONFIG_FILE}"
    )


def _config(directory: Path) -> dict[str, Any]:
    with boundary(ConfigError, f"adapter {directory} cannot be read"):
        config: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text())
    if more := [name for name in _MORE if config.get(name)]:
        raise ConfigError(f"adapter {directory} has {more[0]}, which is more than low-rank updates")
    return config


def _read(directory: Path) -> dict[str, Tensor]:
    with boundary(ConfigError, f"adapter {directory} cannot be read"):
        return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / WEIGHTS_FILE).items()}


def _size(tensors: dict[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"
