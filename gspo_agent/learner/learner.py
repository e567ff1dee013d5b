"""The model that is trained: optimiser steps on rollout batches, and its weights for whoever samples.

Nothing here is random but the order of trajectories and the beginning of an adapter. The order and the learning rate
are functions of the step, the adapter is one of the seed. So a restart needs the weights and the optimiser's moments,
and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gspo_agent.engine.base import Weights
from gspo_agent.engine.model import load_model
from gspo_agent.engine.sender import Sender
from gspo_agent.errors import ConfigError, boundary
from gspo_agent.learner import checkpoint
from gspo_agent.learner.batch import Batch
from gspo_agent.learner.logprobs import Scorer
from gspo_agent.learner.losses import LOSSES, LossOutput
from gspo_agent.learner.tally import Tally
from gspo_agent.learner_config import LearnerConfig

_FRESH = 1  # the lag of a token that the weights before this step sampled
_WORTHWHILE = 1024  # padded tokens from which a micro-batch is closed ...
_DENSE = 0.9  # ... once the next row is shorter than this share of its longest


class Learner:
    """One process today; ranks under torchrun would share a batch behind the same calls.

    Weights and optimiser are float32 whatever `config.dtype`: a learning rate of 1e-6 is far below one bfloat16 step of
    a weight. "bfloat16" is the dtype of the model's matrix products; logprobs and loss never are.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model_path: str | Path,
        *,
        temperature: float,
        total_steps: int,
        seed: int,
        threads: int = 1,
    ) -> None:
        """Loads the model; raises ConfigError where it cannot.

        Args:
            model_path: a transformers directory, or a hub name.
            temperature: the one that episodes are sampled at.
            total_steps: training steps of the whole run; the linear schedule ends there.
            threads: of torch in this process, where the device is a CPU.
        """
        self.config, self.model_path = config, Path(model_path)
        self.total_steps, self.seed, self.threads = total_steps, seed, threads
        self.device = _device(config.device)
        self._use_threads()
        self.model = load_model(model_path, config.lora, seed=seed)
        self.model.to(self.device)  # type: ignore[arg-type]
        self.model.train(False)  # dropout would make the learner's logprobs differ from the engine's
        self.optimizer = _adamw(self.model, config)
        self.skipped_updates = 0
        """Optimiser steps left out for a gradient that was not finite, since the run began."""
        self._sender = Sender(self._named, self.device)
        self._score = Scorer(self.model, temperature)
        self._loss = LOSSES[config.loss.name]
        self._loss_options = config.loss.model_dump(exclude={"name"})

    def step(self, batch: Batch) -> dict[str, float]:
        """One pass over `batch`, in `config.mini_batches` optimiser steps; blocking. Returns the step's metrics.

        `clip_frac/0` and so on are shares of tokens by mini-batch; the other loss metrics are over all of them.
        `..._at_zero_updates` compare engine and learner under the same weights: tokens that the weights before this
        step sampled, in the first mini-batch.
        """
        begun = time.process_time()
        self._sender.forget()
        self._use_threads()
        lr = self._set_lr(batch.step)
        metrics, losses, norms, tallies = dict(batch.metrics), [], [], []
        for index, part in enumerate(self._mini_batches(batch)):
            loss, tally, fresh = self._accumulate(part)
            norms.append(self._update())
            losses.append(loss)
            tallies.append(tally)
            metrics[f"clip_frac/{index}"] = tally.metrics()["clip_frac_tok"]
            if index == 0:
                metrics |= _at_zero_updates(fresh)
        finite = [norm for norm in norms if isfinite(norm)]
        self.skipped_updates += len(norms) - len(finite)
        return (
            metrics
            | (sum(tallies[1:], tallies[0]).metrics() if tallies else {})
            | {
                "loss": sum(losses) / max(len(losses), 1),
                "grad_norm": sum(finite) / max(len(finite), 1),
                "grad_norm/max": max(finite, default=0.0),
                "updates": float(len(finite)),
                "skipped_updates": float(len(norms) - len(finite)),
                "empty_trajectories": batch.num_trajectories
                - sum(float(tally.sums["trajectories"]) for tally in tallies),
                "lr": lr,
                "learner_cpu_seconds": time.process_time() - begun,
            }
        )

    def weights(self, version: int, path: Path | None = None) -> Weights:
        """The current weights as `version`. The tensors are the learner's own: copy them before the next step."""
        self._sender.hold(version)
        return Weights(version, path, self._named, self.send)

    def send(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of `Sender`; see `engine.base.Source`. Possible from another thread during a step."""
        return function(self._sender, *arguments)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """The logprob of every token but the first, under the current weights."""
        inputs, targets = (torch.tensor([part], device=self.device) for part in (token_ids[:-1], token_ids[1:]))
        with self._precision():
            scored = Scorer(self.model, temperature)(inputs, targets, torch.ones_like(targets, dtype=torch.bool))
        return [float(value) for value in scored[0]]

    def save(self, root: Path, step: int) -> checkpoint.Saved:
        """Writes `root/step-N`; see `checkpoint.save`."""
        return checkpoint.save(self, root, step)

    def export(self, root: Path, step: int) -> Path:
        """Writes `root/step-N` for engines; see `checkpoint.export`."""
        return checkpoint.export(self, root, step)

    def restore(self, path: Path, digest: str | None = None) -> int:
        """Goes on from a checkpoint; see `checkpoint.restore`."""
        self._sender.forget()
        return checkpoint.restore(self, path, digest)

    def close(self) -> None:
        """Nothing to end: it lives in this process."""

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.state_dict().items()

    def _mini_batches(self, batch: Batch) -> list[Batch]:
        """Trajectories in an order that depends on (seed, step), in `mini_batches` parts as equal as can be; those
        without anything to train are left out."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + batch.step)
        ids = torch.unique(batch.trajectory_ids)
        ids = ids[torch.randperm(len(ids), generator=draw)]
        parts = [
            batch.rows(torch.isin(batch.trajectory_ids, chosen).nonzero()[:, 0])
            for chosen in torch.tensor_split(ids, self.config.mini_batches)
        ]
        return [part for part in parts if part.loss_mask.any()]

    def _accumulate(self, part: Batch) -> tuple[float, Tally, Tally]:
        """Adds up the gradients of one mini-batch; (loss, tally, tally of the fresh tokens alone)."""
        counts = {"num_trajectories": part.num_trajectories, "num_tokens": int(part.loss_mask.sum())}
        losses, tallies, fresh_tallies = [], [], []
        for micro in micro_batches(part, self.config.micro_batch_tokens):
            here = micro.to(self.device)
            with self._precision():
                logprobs = self._score(here.inputs, here.targets, here.loss_mask)

            def loss(logprobs: Tensor, mask: Tensor, here: Batch = here) -> LossOutput:
                return self._loss(
                    logprobs,
                    here.rollout_logprobs,
                    mask,
                    here.advantages,
                    here.trajectory_ids,
                    **counts,
                    **self._loss_options,
                )

            output = loss(logprobs, here.loss_mask)
            output.loss.backward()  # type: ignore[no-untyped-call]
            losses.append(output.loss.detach())
            tallies.append(output.tally)
            fresh_tallies.append(loss(logprobs.detach(), here.loss_mask & (here.weight_lags == _FRESH)).tally)
        return float(sum(losses)), sum(tallies[1:], tallies[0]), sum(fresh_tallies[1:], fresh_tallies[0])

    def _update(self) -> float:
        """One optimiser step, unless the gradient is not finite; returns the gradient's norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _set_lr(self, step: int) -> float:
        """ "linear": from `lr` at step 1 to a tenth of it at the last."""
        done = min(1.0, max(0, step - 1) / max(1, self.total_steps - 1))
        lr = self.config.lr * (1 - 0.9 * done if self.config.lr_schedule == "linear" else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _precision(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _use_threads(self) -> None:
        if self.device.type == "cpu" and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def micro_batches(part: Batch, max_tokens: int) -> list[Batch]:
    """Parts of at most `max_tokens` padded tokens (a longer trajectory goes alone), by length, so little is padded.

    Rows without anything to train are left out; rows of one trajectory stay together, as their ratio needs them all.
    """
    rows_of: dict[int, list[int]] = {}
    for row in part.loss_mask.any(1).nonzero()[:, 0].tolist():
        rows_of.setdefault(int(part.trajectory_ids[row]), []).append(row)
    lengths = part.lengths.tolist()
    width = {number: max(lengths[row] for row in rows) for number, rows in rows_of.items()}
    chosen: list[list[int]] = []
    padded = widest = 0
    for number in sorted(rows_of, key=lambda number: -width[number]):
        rows = rows_of[number]
        sparse = padded >= _WORTHWHILE and width[number] < _DENSE * widest
        if not chosen or sparse or padded + len(rows) * widest > max_tokens:
            chosen.append([])
            padded, widest = 0, width[number]
        chosen[-1] += rows
        padded += len(rows) * widest
    return [part.rows(torch.tensor(rows)) for rows in chosen]


def _at_zero_updates(tally: Tally) -> dict[str, float]:
    metrics = tally.metrics()
    if not metrics["trajectories"]:
        return {}
    return {
        "log_s_at_zero_updates/mean": metrics["log_s/mean"],
        "log_s_at_zero_updates/std": metrics["log_s/std"],
        "log_s_at_zero_updates/max": metrics["log_s/max"],
        "out_of_band_at_zero_updates": metrics["out_of_band_seq"],
        "mismatch_kl_at_zero_updates": metrics["approx_kl"],
        "logprob_diff_at_zero_updates/mean": metrics["logprob_diff/mean"],
        "logprob_diff_at_zero_updates/max": metrics["logprob_diff/max"],
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with boundary(ConfigError, f"learner.device {name!r}"):
        return torch.empty(0, device=name).device


def _adamw(model: PreTrainedModel, config: LearnerConfig) -> torch.optim.AdamW:
    """Weight decay is for matrices; norms and biases have none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
