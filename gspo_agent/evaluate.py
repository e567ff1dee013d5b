"""How good a frozen policy is: pass@k and avg@k on tasks that training never sees; and episodes for their own sake."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gspo_agent.assembly import env_factories, find_model, make_engine, open_sources
from gspo_agent.background import off_loop
from gspo_agent.chat import Chat, load_chat
from gspo_agent.config import Config
from gspo_agent.engine.base import Engine, Weights
from gspo_agent.engine.local import LocalEngine
from gspo_agent.engine.publish import publish
from gspo_agent.env import Env, EnvFactory
from gspo_agent.errors import ConfigError, EnvError, JournalError, written
from gspo_agent.monitor.metrics import summarise
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout.collector import Source
from gspo_agent.rollout.episode import run_episode
from gspo_agent.run import Run
from gspo_agent.serving import serving
from gspo_agent.trajectory import Status, Trajectory

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
_CLOSE_SECONDS, _LAST_CLOSE_SECONDS = 30.0, 0.3


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The episodes of one evaluation, `samples` per task."""

    trajectories: list[list[Trajectory]]
    """Per task."""
    failures: list[str]
    """Episodes that environment, engine or sandbox broke, after all attempts; in no rate."""

    def metrics(self, pass_threshold: float) -> dict[str, float]:
        """`pass_rate` (avg@k), its standard error over tasks, `pass@k` for every k that the samples allow, and
        what `monitor.metrics.summarise` shows."""
        flat = [trajectory for several in self.trajectories for trajectory in several]
        if not flat:
            return {"episodes": 0.0, "failed_episodes": float(len(self.failures))}
        counts = [(len(t), sum(x.reward >= pass_threshold for x in t)) for t in self.trajectories if t]
        rates = [passed / n for n, passed in counts]
        mean = sum(rates) / len(rates)
        spread = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / max(1, len(rates) - 1))
        metrics = summarise(flat, pass_threshold) | {
            "pass_rate": mean,
            "pass_rate/standard_error": spread / math.sqrt(len(rates)),
            "episodes": float(len(flat)),
            "failed_episodes": float(len(self.failures)),
        }
        for k in range(1, min(n for n, _ in counts) + 1):
            metrics[f"pass@{k}"] = sum(pass_at_k(n, passed, k) for n, passed in counts) / len(counts)
        return metrics


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374)."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


async def evaluate(
    sources: Sequence[Source],
    *,
    chat: Chat,
    engine: Engine,
    episodes: int,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    concurrency: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Runs `samples` episodes on each of `episodes` tasks, the same tasks and seeds at every call.

    Nothing is journaled. `progress` is called with (done, total) after every episode.
    """
    running = asyncio.Semaphore(concurrency)
    failures: list[str] = []
    total, done = episodes * samples, 0

    async def one(number: int, sample: int) -> Trajectory | None:
        nonlocal done
        source, cursor = sources[number % len(sources)], number // len(sources)
        async with running:
            trajectory = await _episode(source, cursor, (number, sample), chat, engine, temperature, seed, failures)
        done += 1
        if progress is not None:
            progress(done, total)
        return trajectory

    try:
        async with asyncio.TaskGroup() as tasks:
            started = [[tasks.create_task(one(n, k)) for k in range(samples)] for n in range(episodes)]
    except ExceptionGroup as several:  # the first says what is wrong
        raise several.exceptions[0] from None
    results = [[task.result() for task in several] for several in started]
    return Evaluation([[t for t in several if t is not None] for several in results], failures)


async def _episode(
    source: Source,
    cursor: int,
    place: tuple[int, int],
    chat: Chat,
    engine: Engine,
    temperature: float,
    seed: int,
    failures: list[str],
) -> Trajectory | None:
    number, sample = place
    for attempt in range(_ATTEMPTS):
        # Negative group ids: no request of an evaluation shares its name with one of training.
        trajectory = Trajectory(-1 - number, sample, attempt, seed=_seed(seed, number, sample))
        env: Env | None = None
        try:
            env = source.factory.create()
            await run_episode(
                trajectory,
                env=env,
                chat=chat,
                engine=engine,
                task=source.tasks.task(cursor),
                limits=source.limits,
                temperature=temperature,
                renew=source.factory.create,
            )
        except ConfigError:
            raise
        except Exception as error:  # one environment that cannot be made takes no evaluation down
            cause = f"{type(error).__name__}: {error}"
        else:
            if trajectory.status is not Status.FAILED:
                return trajectory
            cause = trajectory.stop_reason or "failed"
        finally:
            await _close(env)
    failures.append(cause)
    return None


async def _close(env: Env | None) -> None:
    if env is None:
        return
    try:
        task = asyncio.current_task()
        async with asyncio.timeout(_LAST_CLOSE_SECONDS if task is not None and task.cancelling() else _CLOSE_SECONDS):
            await env.aclose()
    except Exception as error:  # the episode is over; its result does not hang on this
        _log.warning("%s.close: %s: %s", type(env).__name__, type(error).__name__, error)


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


async def evaluate_held_out(
    config: Config,
    sources: Sequence[Source],
    chat: Chat,
    engine: Engine,
    progress: Callable[[int, int], None] | None = None,
    *,
    samples: int = 1,
) -> Evaluation:
    """The configured evaluation on `sources`, those of the configured split; never more tasks than there are."""
    evaluation = config.evaluation
    return await evaluate(
        sources,
        chat=chat,
        engine=engine,
        episodes=_at_most(sources, evaluation.episodes, evaluation.split),
        samples=samples,
        temperature=evaluation.temperature,
        seed=config.run.seed,
        concurrency=config.engine.max_running,
        progress=progress,
    )


async def evaluate_policy(
    config: Config, run: Run | None, *, model: Path | None = None, samples: int = 1
) -> dict[str, float]:
    """Measures `model`: by default the run's newest checkpoint, or the model that training begins with."""
    screen = Screen(config)
    with screen:
        factories = env_factories(config)
        sources = open_sources(config, factories, config.evaluation.split)
        path = await off_loop(policy_path, config, factories, run, model, screen)
        try:
            async with _engine(config, path, screen) as engine:
                screen.phase(f"measuring {path}")
                held_out = await evaluate_held_out(
                    config, sources, load_chat(path), engine, screen.advance, samples=samples
                )
        finally:
            await asyncio.gather(*(factory.aclose() for factory in factories))
    _some_scored(held_out)
    return held_out.metrics(config.evaluation.pass_threshold)


@asynccontextmanager
async def _engine(config: Config, model: Path, screen: Screen) -> AsyncIterator[Engine]:
    """Opened, and sampling from `model`; servers may have other weights until then."""
    async with serving(config, model, screen) as servers:
        await servers.ready()
        engine = make_engine(config, model, servers.urls)
        try:
            await engine.open()
            if not isinstance(engine, LocalEngine):
                await publish(Weights(0, model, lambda: ()), engine)
            yield engine
        finally:
            await engine.close()


def _some_scored(result: Evaluation) -> None:
    """Raises EnvError where no episode has come to a verdict."""
    if result.failures and not any(result.trajectories):
        raise EnvError(f"all {len(result.failures)} episodes failed, {_ATTEMPTS} times each: {result.failures[0]}")


async def collect(
    config: Config,
    run: Run | None,
    *,
    out: Path,
    model: Path | None = None,
    episodes: int = 16,
    samples: int = 1,
    split: str = "train",
) -> tuple[int, list[str]]:
    """Writes `samples` episodes on each of `episodes` tasks to `out` as JSONL.

    Returns: How many were written, and why others failed.
    """
    screen = Screen(config)
    with screen:
        factories = env_factories(config)
        sources = open_sources(config, factories, split)
        with written(out):  # before minutes are spent on what could not be kept
            out.parent.mkdir(parents=True, exist_ok=True)
            out.open("ab").close()
        path = await off_loop(policy_path, config, factories, run, model, screen)
        try:
            async with _engine(config, path, screen) as engine:
                screen.phase("episodes")
                result = await evaluate(
                    sources,
                    chat=load_chat(path),
                    engine=engine,
                    episodes=_at_most(sources, episodes, split),
                    samples=samples,
                    temperature=config.rollout.temperature,
                    seed=config.run.seed,
                    concurrency=config.engine.max_running,
                    progress=screen.advance,
                )
        finally:
            await asyncio.gather(*(factory.aclose() for factory in factories))
    _some_scored(result)
    flat = [trajectory for several in result.trajectories for trajectory in several]
    with written(out), out.open("wb") as file:
        for trajectory in flat:
            file.write(orjson.dumps(to_json(trajectory), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    return len(flat), result.failures


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """One episode as a JSON object: what was said, what it earned, and per token who wrote it and how likely."""
    row = trajectory.rows()[0]
    return {
        "id": trajectory.id,
        "status": str(trajectory.status),
        "stop_reason": trajectory.stop_reason,
        "reward": trajectory.reward,
        "components": [dict(reward.components) for reward in trajectory.rewards],
        "metrics": trajectory.metrics,
        "messages": trajectory.messages,
        "token_ids": row.token_ids,
        "sampled": row.sampled,
        "rollout_logprobs": row.rollout_logprobs,
        "weight_versions": row.weight_versions,
    }


def policy_path(
    config: Config, factories: Sequence[EnvFactory], run: Run | None, model: Path | None, screen: Screen
) -> Path:
    """Where the policy lies: `model`, else the run's newest checkpoint, else what training would begin with."""
    if model is not None:
        if not model.is_dir():
            raise ConfigError(f"no model directory {str(model)!r}")
        return model
    if run is not None:
        newest = run.newest_checkpoint()
        if newest is not None and not newest.is_dir():
            raise JournalError(f"checkpoint {newest} does not exist, but the journal names it; give --model DIRECTORY")
        if newest is not None:
            return newest
    return find_model(config, factories, run, screen)


def _at_most(sources: Sequence[Source], episodes: int, split: str) -> int:
    """`episodes`, or as many tasks as there are: no task twice in one evaluation."""
    counts = [source.tasks.num_tasks for source in sources]
    if any(count == 0 for count in counts):
        raise ConfigError(f"the split {split!r} has no task")
    finite = [count for count in counts if count is not None]
    return min(episodes, min(finite) * len(sources)) if finite else episodes
