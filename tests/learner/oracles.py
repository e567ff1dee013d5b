"""The cases of `tests/cases/gspo_oracles.json`, in the words of this code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_agent.learner.losses import sequence_geo, token_tis

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "cases" / "gspo_oracles.json").read_text())["cases"]
}

_LOSS = {
    "gspo": "gspo",
    "gspo_segment": "gspo",
    "gspo_decoupled": "gspo",
    "gspo_token": "gspo_token",
    "gspo_token_decoupled": "gspo_token",
    "grpo": "grpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
}
_OPTION = {
    "eps_low": "clip_low",
    "eps_high": "clip_high",
    "dual": "dual_clip",
    "log_clamp": "log_clamp",
    "tau_pos": "tau_positive",
    "tau_neg": "tau_negative",
    "kl_beta": "kl_coef",
}
LOSS_CASES = [name for name, case in CASES.items() if case["config"]["algo"] in _LOSS]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_call(case: dict[str, Any]) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """(name of the loss, its tensors with a leaf `logprobs`, its options)"""

    given, config = case["inputs"], case["config"]
    tensors = {
        "logprobs": tensor(given["logp"]).requires_grad_(),
        "old_logprobs": tensor(given.get("prox_logp", given["behav_logp"])),
        "loss_mask": tensor(given["mask"]).bool(),
        "advantages": tensor(given.get("advantages_tok", given.get("advantages"))),
    }
    options: dict[str, Any] = {_OPTION[key]: value for key, value in config.items() if key in _OPTION}
    if config.get("agg") == "token-mean":
        options["aggregation"] = "token"
    if "segments" in given:
        options["turn_ids"] = torch.tensor(given["segments"])
    if "ref_logp" in given:
        options["ref_logprobs"] = tensor(given["ref_logp"])
    rollout = tensor(given["behav_logp"])
    if config.get("correction") == "token_tis":
        options["token_weights"] = token_tis(tensors["old_logprobs"], rollout, cap=config["cap"])
    if config.get("correction") == "seq_geo":
        options["token_weights"] = sequence_geo(tensors["old_logprobs"], rollout, tensors["loss_mask"])
    return _LOSS[config["algo"]], tensors, options
