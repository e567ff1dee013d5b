"""Serving: the SGLang servers of a run directory: those of a `gspo-agent serve` that is running, or a process's own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo_agent.assembly import env_factories, find_model
from gspo_agent.background import off_loop
from gspo_agent.config import Config
from gspo_agent.engine.adapter import base_of
from gspo_agent.engine.servers import Servers, read_servers
from gspo_agent.errors import ConfigError, RunLocked
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout import lock
from gspo_agent.rollout.lock import RunLock
from gspo_agent.run import Run
from gspo_agent.serving_config import ServersConfig

_BEGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Serving:
    """Where tokens are asked for."""

    urls: Sequence[str] = field(default_factory=list)
    own: Servers | None = None
    """Those that this process started."""

    async def ready(self) -> None:
        """Returns when its own servers can compute."""
        if self.own is not None:
            await self.own.ready()

    def problems(self) -> dict[str, str]:
        """Address -> what is the matter with it, of its own servers."""
        return {} if self.own is None else self.own.problems()


async def serve(config: Config, screen: Screen | None = None) -> None:
    """Keeps the servers of a configuration until it is cancelled; runs on the same directory use them."""
    if config.engine.kind != "sglang" or config.engine.urls:
        raise ConfigError('these servers are for engine.kind = "sglang" without engine.urls; give engine.kind=sglang')
    screen = screen or Screen(config)
    run = Run.prepare(config)
    with screen:
        if not run.config_file.exists():
            run.record_config(config)
        model = await off_loop(find_model, config, env_factories(config), run, screen)
        async with _own(config, run, model, screen, shared=True) as servers:
            screen.phase("serving")
            screen.watch(lambda: servers, lambda: {"tokens": 0}, lambda: _listed(servers.problems()))
            await servers.ready()
            screen.note(f"all are ready; runs in {run.dir} use them, and Ctrl-C ends them")
            await asyncio.Event().wait()


@asynccontextmanager
async def serving(config: Config, model: Path, screen: Screen, *, training: bool = False) -> AsyncIterator[Serving]:
    """Those of `engine.urls`; else of the `serve` that is running on the run's directory; else its own, which start
    now and end with the block. Raises RunLocked where those of the directory are somebody's alone."""
    run, engine = Run(config.run.dir), config.engine
    if engine.kind != "sglang" or engine.urls:
        yield Serving(engine.urls)
    elif (urls := await _shared(run, training)) is not None:
        screen.note(f"using the servers of `gspo-agent serve`: {', '.join(urls)}")
        yield Serving(urls)
    else:
        async with _own(config, run, model, screen, shared=False) as servers:
            yield Serving(servers.urls, servers)


@asynccontextmanager
async def _own(config: Config, run: Run, model: Path, screen: Screen, *, shared: bool) -> AsyncIterator[Servers]:
    gpus = shared_out(config, _visible())
    servers = Servers(options(config, gpus), base_of(model), run.servers, gpus=gpus, tell=screen.note, shared=shared)
    held = RunLock(run.servers)
    try:
        async with servers:
            yield servers
    finally:
        held.release()


async def _shared(run: Run, training: bool) -> list[str] | None:
    """The addresses of what `gspo-agent serve` keeps; None where nobody has servers there."""
    begun = asyncio.get_running_loop().time()
    while True:
        try:
            RunLock(run.servers).release()
        except RunLocked:
            record, owner = read_servers(run.servers), lock.path_of(run.servers).read_text()
            if owner == f"pid {record.get('pid')} on {socket.gethostname()}":
                break
            if asyncio.get_running_loop().time() - begun > _BEGIN_SECONDS:  # another host's, or not begun
                raise
            await asyncio.sleep(0.1)
        else:
            return None
    if not record["shared"]:
        raise RunLocked(f"the servers in {run.servers} are those of another command ({owner}); stop it first")
    if not training:
        RunLock(run.journal).release()  # other weights would be published to a run that samples from them
    return [server["url"] for server in record["servers"]]


def options(config: Config, gpus: Sequence[Sequence[str]]) -> ServersConfig:
    """Those of `[engine.servers]`, and what the servers need besides for placement and adapters."""
    servers, lora = config.engine.servers, config.learner.lora
    needed: dict[str, Any] = {}
    if config.engine.placement == "colocated" and gpus:
        needed["enable_memory_saver"] = True
    if lora is not None:
        needed |= {"enable_lora": True, "max_lora_rank": lora.rank, "lora_target_modules": lora.targets}
    return servers.model_copy(update={"args": {**needed, **servers.args}})


def shared_out(config: Config, visible: Sequence[str]) -> list[list[str]]:
    """The GPUs of each server; [] where there is nothing to share out.

    Args:
        visible: What this process sees, as CUDA_VISIBLE_DEVICES has them.

    Raises ConfigError where there are too few.
    """
    servers = config.engine.servers
    if not visible or servers.args.get("device", "cuda") != "cuda":
        return []
    if servers.gpus is not None:
        free = servers.gpus
        if wrong := [gpu for gpu in free if gpu >= len(visible)]:
            raise ConfigError(f"engine.servers.gpus names {wrong[0]}, but this process sees {len(visible)} GPUs")
    else:
        free = [gpu for gpu in range(len(visible)) if gpu != _learners(config)]
    each = servers.tp * servers.dp
    if len(free) < servers.count * each:
        raise ConfigError(
            f"engine.servers needs count * tp * dp = {servers.count * each} GPUs, and of {len(visible)} there are "
            f'{len(free)} for it; engine.placement = "colocated" shares the learner\'s, and engine.servers.gpus names '
            "which, one of them twice if need be"
        )
    return [[visible[gpu] for gpu in free[n * each : (n + 1) * each]] for n in range(servers.count)]


def _learners(config: Config) -> int | None:
    """The GPU that the learner keeps to itself."""
    if config.engine.placement == "colocated":
        return None
    kind, _, number = config.learner.device.partition(":")
    return None if kind == "cpu" else int(number or 0)


def _visible() -> list[str]:
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def _listed(problems: dict[str, str]) -> str:
    return "; ".join(f"{url}: {problem}" for url, problem in problems.items())
