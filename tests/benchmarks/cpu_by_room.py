"""Which room of the framework spends the CPU: the main thread's stack, sampled; the other threads' own clocks; and
the garbage collector's share."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

ROOMS = (
    ("aiohttp", "HTTP client"),
    ("gspo_agent/chat", "chat"),
    ("gspo_agent/env", "environment"),
    ("gspo_agent/tools", "environment"),
    ("gspo_agent/rollout/journal", "journal, caller's side"),
    ("gspo_agent/rollout/events", "events"),
    ("gspo_agent/rollout/state", "events"),
    ("gspo_agent/trajectory", "events"),
    ("gspo_agent/rollout", "episode loop and collector"),
    ("benchmarks/orchestration", "the engine's client and the tool"),
    ("asyncio/", "event loop"),
)
_SECONDS = 0.001


class GarbageClock:
    """CPU seconds of the garbage collector within a `with` block, in whichever thread it runs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> GarbageClock:
        gc.callbacks.append(self._tell)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._tell)

    def _tell(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


class CpuByRoom:
    """Samples every millisecond of CPU; a `with` block around what is to be measured, in the main thread.

    A sample belongs to the innermost of ROOMS on the stack, so the libraries that a room calls count as its own.
    """

    def __init__(self) -> None:
        self.rooms: Counter[str] = Counter()
        self.threads: dict[str, float] = {}
        self.main = 0.0

    def __enter__(self) -> CpuByRoom:
        self._before = _clocks()
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, _SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for thread, spent in _clocks().items():
            spent -= self._before.get(thread, 0.0)
            if thread is threading.main_thread():
                self.main += spent
            else:
                name = "journal, writer's thread" if thread.name == "journal" else "threads of synchronous hooks"
                self.threads[name] = self.threads.get(name, 0.0) + spent

    def _sample(self, number: int, frame: FrameType | None) -> None:
        innermost, room = frame, None
        while frame is not None and room is None:
            name = frame.f_code.co_filename
            # While the loop waits, the time is another thread's.
            if frame is innermost and name.endswith("selectors.py"):
                return
            room = next((room for path, room in ROOMS if path in name), None)
            frame = frame.f_back
        self.rooms[room or "other"] += 1

    def table(self, turns: int) -> str:
        """Milliseconds of CPU a turn, the largest first."""
        total = self.rooms.total() or 1
        spent = {room: self.main * number / total for room, number in self.rooms.items()} | self.threads
        rows = sorted(spent.items(), key=lambda item: -item[1])
        return "\n".join(f"  {1000 * seconds / turns:.3f}  {room}" for room, seconds in rows)


def _clocks() -> dict[threading.Thread, float]:
    """CPU seconds of every living thread."""
    clocks: dict[threading.Thread, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and sys.platform == "linux":
            clocks[thread] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return clocks
