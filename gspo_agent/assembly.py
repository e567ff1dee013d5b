"""What a run is assembled from: environments, tasks, the model, the engine."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from gspo_agent.cold_start import make_model
from gspo_agent.config import Config
from gspo_agent.engine.adapter import is_adapter
from gspo_agent.engine.base import Engine
from gspo_agent.engine.delivery import Transport
from gspo_agent.engine.local import LocalEngine
from gspo_agent.engine.model import sizes
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.env import EnvFactory
from gspo_agent.errors import ConfigError, written
from gspo_agent.monitor.screen import Screen
from gspo_agent.quota import Quota
from gspo_agent.rollout.collector import Source
from gspo_agent.run import Run
from gspo_agent.sandbox import SandboxSettings, share
from gspo_agent.tasks import TaskSource

_TOKENIZER_FILES = ("tokenizer", "chat_template", "vocab", "merges", "added_tokens", "special_tokens")
_PATIENCE = 600.0

# The screen shows what is going on.
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def env_factories(config: Config, env: type | Callable[..., Any] | None = None) -> list[EnvFactory]:
    """One factory per [[env]]; `env` replaces the class of the first. Their code runs as [sandbox] says."""
    share(SandboxSettings(**config.sandbox.model_dump()))
    return [EnvFactory(section, env if number == 0 else None) for number, section in enumerate(config.env)]


def open_sources(config: Config, factories: Sequence[EnvFactory], split: str) -> list[Source]:
    """The tasks of every [[env]] for one split. Raises TaskError before anything is loaded."""
    return [
        Source(
            factory=factory,
            tasks=TaskSource.open(factory, split, seed=config.run.seed, base_dir=config.base_dir),
            limits=section.limits,
            weight=section.weight,
        )
        for section, factory in zip(config.env, factories, strict=True)
    ]


def find_model(config: Config, factories: Sequence[EnvFactory], run: Run | None, screen: Screen) -> Path:
    """Where the model to begin with lies; "tiny" is made on the spot and kept in the run directory."""
    if config.model != "tiny":
        path = Path(config.model).expanduser()
        local = path if path.is_absolute() else config.base_dir / path
        if is_adapter(local):
            raise ConfigError(
                f"model {config.model!r} is an adapter; training begins with a whole model: `gspo-agent merge "
                f"{local} OUT` makes one"
            )
        if local.exists():
            return local
        if config.model.startswith((".", "/", "~")):  # no hub name, nor a reason to ask the network
            raise ConfigError(f"no model directory {config.model!r} in {config.base_dir}; write a path, or a hub name")
        return Path(config.model)
    if run is not None and run.model.exists():
        return run.model
    seed = config.run.seed if config.cold_start.seed is None else config.cold_start.seed
    screen.phase("cold start: a small model learns from demonstrations")
    made = make_model(config.cold_start, factories, seed, progress=screen.advance)
    if run is None:
        return made
    with written(run.model), tempfile.TemporaryDirectory(prefix="model.tmp", dir=run.dir) as temporary:
        copy = shutil.copytree(made, Path(temporary) / "model")
        try:
            copy.rename(run.model)
        except OSError:
            if not run.model.exists():  # else `serve` and `train` both made it
                raise
    return run.model


def tokenizer_digest(model: Path) -> str | None:
    """Of every file of a model directory that decides how text becomes token ids; None for a hub name."""
    if not model.is_dir():
        return None
    total = hashlib.sha256()
    for file in sorted(model.iterdir()):
        if file.name.startswith(_TOKENIZER_FILES):
            total.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def make_engine(config: Config, model: Path, urls: Sequence[str]) -> Engine:
    """The configured engine, to be opened: the embedded one with weights of its own, or the servers at `urls`, which
    have `model`'s architecture and get their weights when they are published."""
    engine, limit = config.engine, config.engine.quota
    quota = None if limit is None else Quota(limit.rate, limit.period, limit.concurrency, "engine.quota")
    if engine.kind == "local":
        lora = None if is_adapter(model) else config.learner.lora
        return LocalEngine(model, lora=lora, max_running=engine.max_running, threads=engine.threads, quota=quota)
    vocab_size, context_tokens = sizes(model)
    return SGLangEngine(
        urls,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        pause_mode=engine.pause_mode,
        flush_cache=engine.flush_cache,
        stream=engine.stream,
        transport=Transport(engine.weights, engine.bucket_mb << 20),
        quota=quota,
        patience=_PATIENCE if engine.urls else engine.servers.ready,  # all of ours may have to start again
    )
