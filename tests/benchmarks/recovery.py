"""How long a run that died takes until every unfinished episode is ready to generate.

    python -m tests.benchmarks.recovery [--episodes 10000] [--tokens 2000] [--keep DIRECTORY]

One process plays episodes of an environment with tools and state up to the middle of their last turn and ends there.
Another, this one, opens the journal and starts the collector; it is done when every episode has asked the engine for
its next token. What is counted is all between: the journal's opening, the ledger, the events, their fold, the
environments and their states. The start of the process is not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gspo_agent.config import EnvConfig, Limits, RolloutConfig
from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.env import EnvFactory, ToolEnv, tool
from gspo_agent.messages import call
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.testing import ByteChat
from gspo_agent.trajectory import Segment, weight_version

TURNS = 4
GROUP = 8
AIM = 10.0  # seconds for 10,000 episodes
CHAT = ByteChat()


class Notebook(ToolEnv):
    """Numbers that are written down and added up; what was written is the state."""

    def setup(self, task: dict[str, Any]) -> None:
        self.pages: dict[str, list[int]] = {"sums": []}

    def prompt(self, task: dict[str, Any]) -> str:
        return f"Add up everything on page {task['page']}, one number after the other."

    @tool
    async def write(self, number: int) -> str:
        """Writes one number down."""
        self.pages["sums"].append(number + int(self.np_random.integers(10)))
        return f"{len(self.pages['sums'])} numbers, the last one is {self.pages['sums'][-1]}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(len(self.pages["sums"]))


class Tasks:
    """As many as are asked for."""

    num_tasks = None

    def task(self, cursor: int) -> dict[str, Any]:
        return {"page": cursor}


@cache
def script(tokens: int) -> list[list[int]]:
    """What the policy says in each turn; a call in all but the last."""
    turns = []
    for turn in range(TURNS):
        calls = [call("write", number=turn)] if turn < TURNS - 1 else []
        short = CHAT.turn("", *calls)
        turns.append(CHAT.turn("x" * (tokens // TURNS - len(short)), *calls))
    return turns


class Stalling:
    """An engine that answers at once, and in the middle of the last turn not any more."""

    name = "policy"
    vocab_size, context_tokens = 264, 1 << 20
    turn: AbstractAsyncContextManager[None] = nullcontext()

    def __init__(self, tokens: int, life: int, expected: int) -> None:
        self.script, self.weight_version, self._expected = script(tokens), weight_version(life, 0), expected
        self.waiting = 0
        self.all_wait, self._never = asyncio.Event(), asyncio.Event()
        self.answers = True

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        ids = list(token_ids)
        number = ids.count(ByteChat.ASSISTANT) - 1
        offset = len(ids) - 1 - (len(ids) - 1 - ids[::-1].index(ByteChat.ASSISTANT))
        rest = self.script[number][offset:][: sampling.max_new_tokens]
        if not self.answers or (number == TURNS - 1 and 2 * offset >= len(self.script[number])):
            self.waiting += 1
            if self.waiting == self._expected:
                self.all_wait.set()
            await self._never.wait()
        await asyncio.sleep(0)
        segment = Segment(rest, self.name, np.full(len(rest), -0.5, np.float32), self.weight_version)
        finish = "stop" if offset + len(rest) == len(self.script[number]) else "length"
        return Completion((segment,), finish)  # type: ignore[arg-type]

    async def abort(self, request_id: str) -> None: ...
    async def clear(self, prefix: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, weights: Weights) -> None: ...
    async def close(self) -> None: ...


def collector_of(journal: Journal, ledger: Ledger, engine: Stalling, episodes: int, places: int | None) -> Collector:
    return Collector(
        journal=journal,
        ledger=ledger,
        sources=[
            Source(
                EnvFactory(EnvConfig(id="tests.benchmarks.recovery:Notebook"), Notebook),
                Tasks(),  # type: ignore[arg-type]
                Limits(turns=8, turn_tokens=8192, context_tokens=60_000),
            )
        ],
        chat=CHAT,  # type: ignore[arg-type]
        engine=engine,
        config=RolloutConfig(
            group_size=GROUP, groups_per_step=episodes // GROUP, over_provision=1.0, max_in_flight=places
        ),
        seed=0,
    )


def play(directory: str, episodes: int, tokens: int) -> None:
    """The first life. It ends without a stop; all that is on disk by then is what the second one has."""

    async def main() -> None:
        journal = Journal.open(Path(directory) / "journal.sqlite")
        engine = Stalling(tokens, journal.life, episodes)
        await collector_of(journal, Ledger(journal), engine, episodes, None).start(0)
        await engine.all_wait.wait()
        journal.flush()

    asyncio.run(main())


def memory() -> float:
    """MiB that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Stopwatch:
    """Prints what each part took, in wall and CPU seconds of this process."""

    def __init__(self) -> None:
        self.began = self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        print(f"  {wall - self.wall:6.2f} s  {cpu - self.cpu:6.2f} CPU s  {memory():6.0f} MiB  {name}", flush=True)
        self.wall, self.cpu = wall, cpu

    def total(self) -> tuple[float, float]:
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]


async def recover(path: Path, episodes: int, tokens: int) -> tuple[float, float]:
    """Wall and CPU seconds until the last episode asks for tokens."""
    watch = Stopwatch()
    journal = Journal.open(path)
    watch.lap("the journal is open")
    ledger = Ledger(journal)
    engine = Stalling(tokens, journal.life, episodes)
    engine.answers = False
    collector = collector_of(journal, ledger, engine, episodes, None)
    await collector.start(0)
    watch.lap("the collector has its groups")
    await engine.all_wait.wait()
    watch.lap("every episode asks for its next token")
    spent = watch.total()
    gc.collect()
    watch.lap("not counted: the first full garbage collection, which is put off until they generate")
    restored = list(collector._attempts.active.values())
    sampled = sum(recorder.episode.sampled for recorder in restored) / len(restored)
    turns = sum(recorder.episode.turn for recorder in restored) / len(restored) + 1
    states = [recorder.episode.state.value for recorder in restored if recorder.episode.state is not None]
    numbers = sum(len(state["attributes"]["pages"]["sums"]) for state in states) / len(restored)
    print(f"  each in turn {turns:.0f}, with {sampled:,.0f} sampled tokens and {numbers:.0f} numbers of state")
    assert collector.progress().restarts == 0
    await collector.stop()
    journal.close()
    return spent


def main(episodes: int, tokens: int, directory: Path) -> None:
    path = directory / "journal.sqlite"
    if not path.exists():
        began = time.perf_counter()
        player = multiprocessing.get_context("spawn").Process(target=play, args=(str(directory), episodes, tokens))
        player.start()
        player.join()
        if player.exitcode:
            raise SystemExit("the first life failed")
        print(f"played for {time.perf_counter() - began:.0f} s")
    size = path.stat().st_size / 2**20
    print(f"{episodes:,} episodes, {size:,.0f} MiB of journal; {memory():.0f} MiB of memory before")
    wall, cpu = asyncio.run(recover(path, episodes, tokens))
    aim = AIM * episodes / 10_000
    print(f"{wall:.2f} s, {cpu:.2f} CPU s; aim {aim:g} s: {'reached' if wall <= aim else 'MISSED'}")
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB at any time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2000, help="sampled tokens of a whole episode")
    parser.add_argument("--keep", type=Path, help="a directory for the journal, to be used again")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        main(arguments.episodes, arguments.tokens, arguments.keep)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(arguments.episodes, arguments.tokens, Path(name))
