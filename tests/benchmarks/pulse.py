"""What it costs a process to look at itself, with many episodes in flight: CPU per look, and what the event loop feels.

    python -m tests.benchmarks.pulse [--episodes 10000] [--seconds 20]

The loop's time is measured as the gaps between its turns while it does nothing else, without the pulse's thread and
with it, in one run. And `gspo-agent status` reads the record of it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import cast

import numpy as np

from gspo_agent.messages import call
from gspo_agent.rollout.events import Acted, Observed, Sampled
from gspo_agent.rollout.groups import Slot
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.rollout.live import Rollouts, read_live
from gspo_agent.rollout.pulse import Pulse
from gspo_agent.rollout.recorder import JournalRecorder, Recorder
from gspo_agent.rollout.stages import Phase
from gspo_agent.trajectory import Segment
from tests.rollout.scene import CHAT

TURNS, TURN_TOKENS, REQUEST_TOKENS = 4, 500, 250


def episode(journal: Journal, ledger: Ledger, number: int) -> JournalRecorder:
    """Four turns and two thousand tokens, under two versions of the weights; every third is inside a tool."""
    recorder = JournalRecorder(journal, ledger, Slot(number, number // 8, number % 8, 0, 0, running=True))
    tokens = np.arange(REQUEST_TOKENS, dtype=np.int32)
    logprobs = np.zeros(REQUEST_TOKENS, np.float32)
    Recorder.record(recorder, Observed(0, [], [1, 2, 3], tools=[]))
    for turn in range(TURNS):
        for part in range(TURN_TOKENS // REQUEST_TOKENS):
            segment = Segment(tokens, "policy", logprobs, 1_000_000 + (turn + part) % 2, turn)
            Recorder.record(recorder, Sampled(turn, len(recorder.episode.token_ids), [segment], "r", None))
        if turn < TURNS - 1:
            Recorder.record(recorder, Observed(turn + 1, [], [4, 5, 6]))
    if number % 3 == 0:
        Recorder.record(recorder, Acted(CHAT.parse(CHAT.turn("", call("look", key=1)), [])))
        recorder.enter("tools")
    else:
        recorder.next_request(256)
        recorder.enter("tokens")
    return recorder


class Frozen:
    """A collector in which nothing happens, with an engine."""

    weight_version = 1_000_001

    def __init__(self, recorders: list[JournalRecorder]) -> None:
        self._active = dict(enumerate(recorders))
        self._requests = {recorder.request_id: 17 for recorder in recorders if recorder.request_id}

    def unjournaled(self) -> dict[str, int]:
        return dict(self._requests)

    def live(self) -> Rollouts:
        return Rollouts(
            active=tuple(self._active.values()), places=[], again=(), paused=False, leasing=None, ready=0, wanted=64,
            flat=0, failed=0, cause="", failures={}, restarts=0, tokens=0,
        )  # fmt: skip


async def gaps(seconds: float) -> tuple[float, float]:
    """Milliseconds between two turns of the loop: the 99.9th percentile, and the most."""
    found, before = [], time.perf_counter()
    end = before + seconds
    while before < end:
        await asyncio.sleep(0)
        now = time.perf_counter()
        found.append(now - before)
        before = now
    return 1000 * float(np.quantile(found, 0.999)), 1000 * max(found)


async def main(episodes: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.sqlite"
        with Journal.open(path) as journal:
            ledger = Ledger(journal)
            frozen = Frozen([episode(journal, ledger, number) for number in range(episodes)])
            gc.freeze()  # as a run does with what is loaded before it begins
            pulse = Pulse(journal, lambda: Phase("waiting for groups", 0.0), patience=300.0)
            pulse.watch(frozen, frozen)
            pulse._loop, pulse._loop_thread = asyncio.get_running_loop(), 0
            pulse.look()
            looks = []
            for _ in range(20):
                before = time.thread_time()
                pulse.look()
                looks.append(time.thread_time() - before)
            spent = statistics.median(looks)
            before = time.thread_time()
            read_live(path.parent)
            reading = time.thread_time() - before
            size = (path.parent / "live.json").stat().st_size
            every = max(2.0, 50 * spent)
            print(f"{episodes} episodes: {1000 * spent:.1f} CPU ms a look, at one every {every:.1f} s")
            print(f"{100 * spent / every:.1f} % of one core; {size / 1000:.0f} kB, read in {1000 * reading:.1f} CPU ms")
            without = await gaps(seconds / 2)
            with Pulse(journal, lambda: Phase("waiting for groups", 0.0), patience=300.0) as pulse:
                pulse.watch(frozen, frozen)
                beside = await gaps(seconds)
            for what, (often, most) in (("without", without), ("with", beside)):
                print(f"turns of the event loop {what:>7} it: 99.9 % within {often:.3f} ms, the longest {most:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    asyncio.run(main(cast(int, arguments.episodes), cast(float, arguments.seconds)))
