"""What a batch of episodes looked like, in numbers that a person reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gspo_agent.rollout.status import COUNT
from gspo_agent.trajectory import Status, Trajectory, version_step


def tool_use(trajectory: Trajectory) -> tuple[int, int, int]:
    """(tool results; turns that began after a result other than "ok"; those of them that called a tool again)."""
    results = chances = retries = 0
    failed = False
    for message in trajectory.messages:
        if message["role"] == "tool":
            results += 1
            failed = failed or message.get("outcome", "ok") != "ok"
        elif message["role"] == "assistant":
            chances += failed
            retries += failed and bool(message.get("tool_calls"))
            failed = False
    return results, chances, retries


def summarise(trajectories: Sequence[Trajectory], pass_threshold: float) -> dict[str, float]:
    """Means over scored episodes: reward, pass rate, tool use, retries after an error, lengths, truncations.

    A rate whose denominator is empty is left out rather than shown as 0. What environments count ("count/...") is added
    up.
    """
    scored = [t for t in trajectories if t.status in (Status.TERMINATED, Status.TRUNCATED)]
    if not scored:
        return {}
    rewards = np.array([t.reward for t in scored])
    uses = [tool_use(t) for t in scored]
    chances = sum(use[1] for use in uses)
    summary = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "pass_rate": float((rewards >= pass_threshold).mean()),
        "tool_use": float(np.mean([use[0] > 0 for use in uses])),
        "turns": float(np.mean([sum(m["role"] == "assistant" for m in t.messages) for t in scored])),
        "tokens/sampled": float(np.mean([t.num_sampled for t in scored])),
        "truncated": float(np.mean([t.status is Status.TRUNCATED for t in scored])),
    }
    if chances:
        summary["retry_after_error"] = sum(use[2] for use in uses) / chances
    return summary | _totals(t.metrics for t in scored) | _means(t.metrics for t in scored)


def staleness(trajectories: Iterable[Trajectory], step: int) -> dict[str, float]:
    """How many steps older than `step` the sampled tokens are, and how many episodes hold several versions."""
    lags: list[int] = []
    counts: list[int] = []
    mixed = 0
    episodes = 0
    for trajectory in trajectories:
        versions = set()
        for segment in trajectory.segments:
            if segment.weight_version is not None:
                lags.append(step - 1 - version_step(segment.weight_version))
                counts.append(len(segment))
                versions.add(segment.weight_version)
        episodes += 1
        mixed += len(versions) > 1
    if not sum(counts):
        return {}
    return {
        "staleness/mean": float(np.average(lags, weights=counts)),
        "staleness/max": float(max(lags)),
        "staleness/mixed_episodes": mixed / episodes,
    }


def engine_use(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """What an engine did between two of its `stats()`: tokens sampled, prompt tokens computed, and prompt tokens whose
    keys and values it still had. A partial rollout that goes on under new weights is computed anew, so the share that
    was cached tells what updates and cuts cost."""
    use = {name: float(after[name] - before[name]) for name in ("tokens", "prefill_tokens", "cached_tokens")}
    prompts = use["prefill_tokens"] + use["cached_tokens"]
    shares = {"engine/cached_share": use["cached_tokens"] / prompts} if prompts else {}
    return {f"engine/{name}": value for name, value in use.items()} | shares


def _means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if not name.startswith(COUNT):
                values[f"env/{name}"].append(float(value))
    return {name: float(np.mean(several)) for name, several in values.items()}


def _totals(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for record in records:
        totals.update({name: float(value) for name, value in record.items() if name.startswith(COUNT)})
    return dict(totals)
