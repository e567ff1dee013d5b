"""Group-relative advantages: what an episode earned against the other attempts at the same task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gspo_agent.trajectory import is_flat


def group_advantages(
    rewards: Sequence[float], *, std: bool = True, ddof: int = 0, eps: float = 0.0
) -> NDArray[np.float64]:
    """(r - mean r) / (std r + eps) within one group (arXiv:2507.18071, eq. 6).

    A reward that is not finite is unscored: its advantage is 0 and the others are computed without it. A group with
    fewer than two scored members, or whose rewards are all equal (`is_flat`), has no advantage: exactly 0.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0])
    array([ 1., -1., -1.,  1.])

    Args:
        rewards: [G]
        std: divide by the standard deviation; False leaves r - mean r (Dr. GRPO, arXiv:2503.20783).
        ddof: 0 population, 1 sample standard deviation; the paper does not say which.
        eps: added to the deviation. At 0 even a tiny difference in reward becomes a full advantage.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof {ddof}: 0 (population) or 1 (sample)")
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards of one group have shape [G], not {list(values.shape)}")
    advantages = np.zeros_like(values)
    scored = np.isfinite(values)
    kept = values[scored]
    if is_flat(kept.tolist()):
        return advantages
    centred = kept - kept.mean()
    advantages[scored] = centred / (kept.std(ddof=ddof) + eps) if std else centred
    return advantages
