"""Policy losses: pure functions of log-probabilities, to be minimised. `LOSSES[name](...) -> LossOutput`.

Axes: B rows, T positions, N the selected tokens of all rows in one line. All arithmetic is float64: the
paper's band of 3e-4 is less than one bfloat16 step at 1, and close to the rounding of a float32 sum over a long row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from gspo_agent.learner.tally import Tally
from gspo_agent.learner.tokens import Tokens, same_shape


@dataclass(frozen=True, slots=True)
class LossOutput:
    loss: Tensor
    """Scalar, float64, with a graph to `logprobs` even where no token is selected."""
    tally: Tally
    """What to add up over micro-batches."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of this call alone."""
        return self.tally.metrics()


class Reduction(TypedDict, total=False):
    """Options that every loss takes."""

    aggregation: Literal["trajectory", "token"]
    """"trajectory" (the paper): mean over trajectories of the mean over their tokens. "token": mean over all tokens
    (DAPO); with `num_tokens` a constant Dr. GRPO's, with the number of trajectories LUSPO's."""
    num_trajectories: int | None
    """Trajectories of the whole mini-batch, empty ones included, where this is a part of it. None: those given."""
    num_tokens: int | None
    """Selected tokens of the whole mini-batch, for aggregation "token"."""
    token_weights: Tensor | None
    """[B, T] detached factors of the tokens' losses, as from `token_tis` and `sequence_geo`."""
    ref_logprobs: Tensor | None
    """[B, T] under a reference policy."""
    kl_coef: float
    """Weight of k3 = exp(ref - logprob) - (ref - logprob) - 1, reduced like the loss."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A loss per token, and which tokens it holds back: all [N]."""

    loss: Tensor
    low: Tensor
    """Gradient cut, or weight capped, at the lower edge."""
    high: Tensor
    dual: Tensor
    outside: Tensor
    """Outside the band on either side, whatever the advantage."""


def _clipped(tokens: Tokens, ratio: Tensor, low: float, high: float, dual_clip: float | None = None) -> _Term:
    """-min(s A, clip(s, 1 - low, 1 + high) A), written out by sign; a ratio on the edge is not clipped."""
    _band(low, high)
    gain, under, over = tokens.advantages, ratio < 1 - low, ratio > 1 + high
    cut_low, cut_high = (gain < 0) & under, (gain > 0) & over
    bounded = torch.where(cut_low, 1 - low, torch.where(cut_high, 1 + high, ratio))
    dual = torch.zeros_like(under)
    if dual_clip is not None:
        dual = (gain < 0) & (ratio > dual_clip)
        bounded = torch.where(dual, dual_clip, bounded)
    return _Term(-bounded * gain, cut_low, cut_high, dual, under | over)


def _band(low: float, high: float) -> None:
    if low < 0 or high < 0:
        raise ValueError(f"clip_low {low}, clip_high {high}: distances from 1, both positive, as in 3e-4 and 4e-4")


def _reduce(
    tokens: Tokens,
    term: _Term,
    *,
    aggregation: Literal["trajectory", "token"] = "trajectory",
    num_trajectories: int | None = None,
    num_tokens: int | None = None,
    token_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossOutput:
    loss, ref_kl = term.loss, torch.zeros_like(term.loss)
    if token_weights is not None:
        same_shape(tokens.mask.shape, token_weights=token_weights)
        loss = loss * token_weights.detach()[tokens.mask].double()
    if ref_logprobs is not None:
        same_shape(tokens.mask.shape, ref_logprobs=ref_logprobs)
        log_ratio = ref_logprobs.detach()[tokens.mask].double() - tokens.logprobs
        ref_kl = torch.expm1(log_ratio) - log_ratio
        loss = loss + kl_coef * ref_kl
    elif kl_coef:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs")
    if aggregation == "trajectory":
        total = tokens.means(loss).sum() / (num_trajectories or tokens.num_trajectories)
    elif aggregation == "token":
        total = loss.sum() / (num_tokens or max(len(loss), 1))
    else:
        raise ValueError(f"aggregation {aggregation!r}: 'trajectory' or 'token'")
    return LossOutput(total, _tally(tokens, term, ref_kl))


@torch.no_grad()
def _tally(tokens: Tokens, term: _Term, ref_kl: Tensor) -> Tally:
    capped = tokens.log_ratio.clamp(-20, 20)
    columns = {
        "low": term.low,
        "high": term.high,
        "dual": term.dual,
        "outside": term.outside,
        "log_ratio": tokens.log_ratio,
        "k3": torch.expm1(capped) - capped,
        "difference": tokens.log_ratio.abs(),
        "logprob": tokens.logprobs,
        "ref_kl": ref_kl,
    }
    values = torch.stack([column.double() for column in columns.values()], dim=1)
    by_trajectory = tokens.means(values)
    log_s = by_trajectory[:, list(columns).index("log_ratio")]
    filled = (torch.bincount(tokens.trajectory, minlength=tokens.num_trajectories) > 0).sum()
    zero = values.new_zeros(1)
    return Tally(
        {
            "tokens": zero[0] + len(values),
            "trajectories": filled,
            "empty": tokens.num_trajectories - filled,
            "no_logprob": tokens.num_refused,
            "square_seq": log_s.square().sum(),
            **dict(zip([f"{name}_tok" for name in columns], values.sum(0), strict=True)),
            **dict(zip([f"{name}_seq" for name in columns], by_trajectory.sum(0), strict=True)),
        },
        {
            "log_s": torch.cat([zero, log_s.abs()]).max(),
            "difference": torch.cat([zero, columns["difference"]]).max(),
        },
    )


def _log_s(tokens: Tokens, log_clamp: float, turn_ids: Tensor | None = None) -> Tensor:
    """[N] the mean log ratio of the token's trajectory, or of its turn. The mean is clamped, never a token's ratio,
    which would move the mean."""
    unit, num_units = tokens.trajectory, tokens.num_trajectories
    if turn_ids is not None:
        same_shape(tokens.mask.shape, turn_ids=turn_ids)
        pairs = torch.stack([tokens.trajectory, turn_ids[tokens.mask].to(tokens.trajectory)])
        distinct, unit = torch.unique(pairs, dim=1, return_inverse=True)
        num_units = distinct.shape[1]
    return tokens.means(tokens.log_ratio, unit, num_units).clamp(-log_clamp, log_clamp)[unit]


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    log_clamp: float = 20.0,
    turn_ids: Tensor | None = None,
    **reduction: Unpack[Reduction],
) -> LossOutput:
    """Group Sequence Policy Optimization (arXiv:2507.18071, eq. 5): one clipped ratio per trajectory.

        s = exp(mean over the trajectory's selected tokens of (logprobs - old_logprobs))

    Args:
        logprobs: [B, T] under the weights being trained, natural log, at the temperature of sampling.
        old_logprobs: [B, T] as the engine reported them when it sampled. One row may hold several weight versions.
        loss_mask: [B, T] True where the policy wrote the token.
        advantages: [B], or [B, T], where each token's own meets the trajectory's ratio.
        trajectory_ids: [B] rows with one id share one ratio and count once.
        dual_clip: upper bound of the ratio where the advantage is negative (above 1), which is else unbounded.
        log_clamp: bound of |log s|; beyond it the ratio stays and the gradient is 0.
        turn_ids: [B, T] gives every turn a ratio of its own (arXiv:2511.20718) in place of the trajectory's.
    """
    tokens = Tokens.select(logprobs, old_logprobs, loss_mask, advantages, trajectory_ids)
    ratio = _log_s(tokens, log_clamp, turn_ids).exp()
    return _reduce(tokens, _clipped(tokens, ratio, clip_low, clip_high, dual_clip), **reduction)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    log_clamp: float = 20.0,
    **reduction: Unpack[Reduction],
) -> LossOutput:
    """GSPO-token (arXiv:2507.18071, eq. 13 and 14): the trajectory's ratio, a gradient and an advantage per token.

    With one advantage per trajectory it equals `gspo` in value, clipping and gradient. Arguments as there.
    """
    tokens = Tokens.select(logprobs, old_logprobs, loss_mask, advantages, trajectory_ids)
    log_s = _log_s(tokens, log_clamp).detach()
    # The difference is exactly 0: adding log s last keeps every digit of it.
    own = torch.where(log_s.abs() < log_clamp, tokens.logprobs - tokens.logprobs.detach(), 0.0)
    return _reduce(tokens, _clipped(tokens, (own + log_s).exp(), clip_low, clip_high, dual_clip), **reduction)


def grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    dual_clip: float | None = None,
    log_clamp: float = 20.0,
    **reduction: Unpack[Reduction],
) -> LossOutput:
    """Group Relative Policy Optimization (arXiv:2402.03300): one clipped ratio per token. Arguments as in `gspo`.

    With aggregation "token" and the band 0.2, 0.28 it is DAPO's loss (arXiv:2503.14476).
    """
    tokens = Tokens.select(logprobs, old_logprobs, loss_mask, advantages, trajectory_ids)
    ratio = tokens.log_ratio.clamp(-log_clamp, log_clamp).exp()
    return _reduce(tokens, _clipped(tokens, ratio, clip_low, clip_high, dual_clip), **reduction)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    **reduction: Unpack[Reduction],
) -> LossOutput:
    """CISPO (arXiv:2506.13585): the clipped ratio is a detached weight, so that every token keeps a gradient.

    The metrics' clip fractions count capped weights. Its paper reduces by "token". Arguments as in `gspo`.
    """
    _band(clip_low, clip_high)
    tokens = Tokens.select(logprobs, old_logprobs, loss_mask, advantages, trajectory_ids)
    ratio = tokens.log_ratio.detach().clamp(max=20).exp()
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages * tokens.logprobs
    return _reduce(tokens, _Term(loss, low, high, torch.zeros_like(low), low | high), **reduction)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    **reduction: Unpack[Reduction],
) -> LossOutput:
    """SAPO (arXiv:2511.20347): a soft gate, -A (4 / tau) sigmoid(tau (r - 1)), in place of a clip.

    tau depends on the advantage's sign; there is no band, so no clip fraction. Arguments as in `gspo`.
    """
    tokens = Tokens.select(logprobs, old_logprobs, loss_mask, advantages, trajectory_ids)
    ratio = tokens.log_ratio.clamp(max=20).exp()
    tau = torch.where(tokens.advantages > 0, tau_positive, torch.full_like(ratio, tau_negative))
    loss = -tokens.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return _reduce(tokens, _Term(loss, none, none, none, none), **reduction)


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    max_ratio: float = 20.0,
    **reduction: Unpack[Reduction],
) -> LossOutput:
    """DPPO, binary total variation (arXiv:2602.04879): a token whose probability has already moved further than the
    band in the direction that its advantage pushes it is dropped; the others weigh min(ratio, max_ratio), detached.

    The band is in probability, not in ratio. Its paper reduces by "token". Arguments as in `gspo`.
    """
    _band(clip_low, clip_high)
    tokens = Tokens.select(logprobs, old_logprobs, loss_mask, advantages, trajectory_ids)
    logprob, log_ratio = tokens.logprobs.detach(), tokens.log_ratio.detach()
    moved = logprob.exp() - (logprob - log_ratio).exp()
    low = (tokens.advantages < 0) & (moved < -clip_low)
    high = (tokens.advantages > 0) & (moved > clip_high)
    weight = torch.where(low | high, 0.0, log_ratio.clamp(max=20).exp().clamp(max=max_ratio))
    loss = -weight * tokens.advantages * tokens.logprobs
    outside = (moved < -clip_low) | (moved > clip_high)
    return _reduce(tokens, _Term(loss, low, high, torch.zeros_like(low), outside), **reduction)


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "grpo": grpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
}


def token_tis(proximal_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float = 2.0) -> Tensor:
    """[B, T] truncated importance weights min(proximal / rollout, cap), for `token_weights` of a loss whose
    `old_logprobs` are the proximal policy's. With the engine's own as `old_logprobs` they would count twice."""
    return (proximal_logprobs.detach().double() - rollout_logprobs.double()).clamp(max=20).exp().clamp(max=cap)


def sequence_geo(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, trajectory_ids: Tensor | None = None
) -> Tensor:
    """[B, T] the geometric mean of proximal / rollout over the trajectory's selected tokens, for `token_weights`."""
    nothing = torch.zeros(len(loss_mask), device=loss_mask.device)
    tokens = Tokens.select(proximal_logprobs.detach(), rollout_logprobs, loss_mask, nothing, trajectory_ids)
    weights = torch.zeros(loss_mask.shape, dtype=torch.float64, device=loss_mask.device)
    return weights.masked_scatter(tokens.mask, _log_s(tokens, 20.0).exp())
