"""How long a weight update takes while every episode is inside a slow tool, and while there is none.

    python -m tests.benchmarks.update_latency [--episodes 64] [--tool-seconds 8] [--updates 20]

An update is what the trainer does: `collector.pause`, `engine.update_weights`, `collector.resume`. Both columns come
from one run and one collector: first before any episode has begun, then with all of them in the tool. Afterwards the
first tokens behind the tool are awaited, and their weight version is compared with the last update's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gspo_agent.config import EnvConfig, Limits, RolloutConfig
from gspo_agent.engine.base import Engine, Weights
from gspo_agent.engine.local import LocalEngine
from gspo_agent.env import EnvFactory, ToolEnv, tool
from gspo_agent.messages import Message, call
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import weight_version
from tests.engine.models import qwen3
from tests.rollout.scene import Tasks, until


class Slow(ToolEnv):
    """Every turn calls a tool that takes long."""

    seconds = 0.0

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(self.seconds)
        return "done"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 0.0


class Brief(ByteChat):
    """Whatever a model samples first is a whole turn, and calls the tool."""

    stop_token_ids = tuple(range(ByteChat.vocab_size))

    def extend(self, token_ids: Sequence[int], turn_start: int, messages: list[Message], tools: Any) -> list[int]:
        return [*self._render(messages), self.ASSISTANT]

    def parse(self, turn_ids: Sequence[int], tools: Any) -> Message:
        return {"role": "assistant", "content": "", "tool_calls": [call("wait")]}


async def updates(collector: Collector, engine: Engine, number: int, weights: Callable[[int], Weights]) -> list[float]:
    """Seconds of each."""
    seconds = []
    for _ in range(number):
        begun = time.perf_counter()
        await collector.pause()
        await engine.update_weights(weights(engine.weight_version + 1))
        await collector.resume()
        seconds.append(time.perf_counter() - begun)
        await asyncio.sleep(0.02)
    return seconds


async def measure(name: str, engine: Any, chat: Any, weights: Any, episodes: int, number: int) -> None:
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    config = RolloutConfig(group_size=8, groups_per_step=episodes // 8, over_provision=1.0, filter_zero_variance=False)
    with (
        tempfile.TemporaryDirectory(dir=root) as directory,
        Journal.open(Path(directory) / "journal.sqlite") as journal,
    ):
        source = Source(EnvFactory(EnvConfig(id="slow"), Slow), Tasks(), Limits(turns=2))
        collector = Collector(
            journal=journal, ledger=Ledger(journal), sources=[source], chat=chat, engine=engine, config=config, seed=0
        )
        idle = await updates(collector, engine, number, weights)
        await collector.start(0)
        await until(lambda: collector.progress().in_tools == episodes)
        begun = time.perf_counter()
        inside = await updates(collector, engine, number, weights)
        assert collector.progress().in_tools == episodes, "the tool is too short for so many updates"
        print(
            f"{name:<9} no episode {show(idle)}   {episodes} episodes in the tool {show(inside)}   "
            f"ratio of medians {statistics.median(inside) / statistics.median(idle):.2f}   "
            f"({number} updates in {time.perf_counter() - begun:.1f} s of the tool's {Slow.seconds:g} s)"
        )
        version = engine.weight_version
        lease = await collector.lease(episodes // 8, step=1)
        after = {
            segment.weight_version
            for group in lease.groups
            for trajectory in group.trajectories
            for segment in trajectory.segments
            if segment.sampled and segment.turn == 1
        }
        print(f"{'':<9} the turn after the tool was sampled by version {after}, the last update was {version}")
        await collector.stop()
    await engine.close()


def show(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.2f} ms (longest {1000 * max(seconds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--tool-seconds", type=float, default=8.0)
    parser.add_argument("--updates", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Slow.seconds = arguments.tool_seconds
    first = weight_version(1, 0)
    model = qwen3(vocab_size=ByteChat.vocab_size, max_position_embeddings=2048)
    local = LocalEngine(model, weight_version=first)
    scripted = ScriptedEngine(lambda prompt, seed: CHAT.turn("", call("wait")), weight_version=first)
    state = model.state_dict()
    for name, engine, chat, weights in (
        ("scripted", scripted, CHAT, lambda version: Weights(version, None, lambda: ())),
        ("local", local, Brief(), lambda version: Weights(version, None, lambda: state.items())),
    ):
        asyncio.run(measure(name, engine, chat, weights, arguments.episodes, arguments.updates))


CHAT = ByteChat()

if __name__ == "__main__":
    main()
