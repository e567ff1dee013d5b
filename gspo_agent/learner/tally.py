"""What a loss reports beside itself, as sums and maxima that add up exactly over micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over tokens (`_tok`) and over trajectories (`_seq`), and maxima. Nothing is divided before `metrics`, so
    that unequal micro-batches cannot be averaged wrongly, and nothing waits for the device before it either."""

    sums: Mapping[str, Tensor]
    peaks: Mapping[str, Tensor]

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.peaks[name]) for name, value in self.peaks.items()},
        )

    def metrics(self) -> dict[str, float]:
        """Fractions and means. `_tok` is a share of tokens (the unit of the paper's figure 2), `_seq` the mean over
        non-empty trajectories of the share of their tokens, which for a ratio per trajectory is a share of these."""
        sums = {name: float(value) for name, value in self.sums.items()}
        tokens, trajectories = max(sums["tokens"], 1.0), max(sums["trajectories"], 1.0)
        tok = {name[:-4]: value / tokens for name, value in sums.items() if name.endswith("_tok")}
        seq = {name[:-4]: value / trajectories for name, value in sums.items() if name.endswith("_seq")}
        return {
            "tokens": sums["tokens"],
            "trajectories": sums["trajectories"],
            "empty_trajectories": sums["empty"],
            "no_logprob_tokens": sums["no_logprob"],
            "clip_frac_low_seq": seq["low"],
            "clip_frac_high_seq": seq["high"],
            "clip_frac_seq": seq["low"] + seq["high"],
            "clip_frac_low_tok": tok["low"],
            "clip_frac_high_tok": tok["high"],
            "clip_frac_tok": tok["low"] + tok["high"],
            "dual_clip_frac_seq": seq["dual"],
            "out_of_band_seq": seq["outside"],
            "out_of_band_tok": tok["outside"],
            "log_s/mean": seq["log_ratio"],
            "log_s/std": sqrt(max(0.0, seq["square"] - seq["log_ratio"] ** 2)),
            "log_s/max": float(self.peaks["log_s"]),
            "logprob_diff/mean": tok["difference"],
            "logprob_diff/max": float(self.peaks["difference"]),
            "approx_kl": tok["k3"],
            "approx_kl_k1": -tok["log_ratio"],
            "entropy_sampled": -tok["logprob"],
            "ref_kl": seq["ref_kl"],
        }
