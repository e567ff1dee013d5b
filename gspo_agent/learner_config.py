"""[learner]: how weights change."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gspo_agent.section import Positive, Section


class GSPO(Section):
    """Group Sequence Policy Optimization: one clipped ratio per trajectory."""

    name: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    clip_high: Annotated[float, Field(gt=0)] = 4e-4


class GSPOToken(Section):
    """GSPO's ratio with an advantage per token."""

    name: Literal["gspo_token"]
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    clip_high: Annotated[float, Field(gt=0)] = 4e-4


class GRPO(Section):
    """One clipped ratio per token; the baseline."""

    name: Literal["grpo"]
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.27


def _named(value: Any) -> Any:
    """A section that only changes a number is about the default loss."""
    return {"name": "gspo", **value} if isinstance(value, dict) else value


LOSS_SECTIONS: dict[str, type[BaseModel]] = {"gspo": GSPO, "gspo_token": GSPOToken, "grpo": GRPO}
Loss = Annotated[GSPO | GSPOToken | GRPO, Field(discriminator="name"), BeforeValidator(_named)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class LoRAConfig(Section):
    """An adapter is trained (LoRA, arXiv:2106.09685), and the model itself stays as it is. Servers have to be started
    with `--enable-lora`; those of `engine.servers` are."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Its update is multiplied by alpha / rank."""
    targets: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    """Last parts of the names of the linear layers that get one."""


class LearnerConfig(Section):
    """How weights change."""

    loss: Loss = GSPO()
    lora: LoRAConfig | None = None
    """Train an adapter and not the model: { rank = 16, alpha = 32, targets = [...] }. None: the whole model."""
    mini_batches: Positive = 4
    """Optimiser steps per rollout batch."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens in one forward and backward pass."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    lr_schedule: Literal["constant", "linear"] = "constant"
    """"linear" decays to a tenth over `steps`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    advantage_std: bool = True
    """Divide a group's advantages by their standard deviation (equation 6 of the paper)."""
    device: str = "auto"
    """"auto" takes a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_logprob_diff: Annotated[float, Field(gt=0)] = 0.02
    """Mean distance of the engine's logprobs from the learner's, under the same weights, from which the run warns."""
