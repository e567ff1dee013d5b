"""Interruption: SIGINT, SIGTERM and a closed terminal cut one task; a second one, or too long a goodbye, ends the
process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

from gspo_agent.errors import GspoAgentError

CUT = 130
"""Exit status after a signal that cut the run, as shells have it for Ctrl-C."""
_LEAVE_SECONDS = 1.9  # what a cut takes at most once running tools have had their time
_SHOW_CURSOR = b"\x1b[?25h"


class Interruption:
    """What a signal does to a run: the first cancels its task, and when the time for leaving is over the process ends,
    whatever still hangs; the second ends it at once.

    >>> interruption = Interruption(grace=30.0, goodbye="stopped; the same line goes on from here")
    >>> interruption.run(train_async(config, interruption=interruption))
    """

    def __init__(
        self, grace: float = 0.0, goodbye: str = "stopped; nothing was kept, the same line begins again"
    ) -> None:
        """
        Args:
            grace: Seconds that running tools get after a SIGTERM or SIGHUP; after a SIGINT they get none.
            goodbye: The line that is written last.
        """
        self._grace, self._goodbye = grace, goodbye
        self._tools_until = 0.0
        self._cut, self._released = threading.Event(), threading.Event()
        self._task: asyncio.Task[object] | None = None
        self._before: dict[int, object] = {}

    @property
    def grace(self) -> float:
        """Seconds that running tools have left; 0 where nothing was interrupted."""
        return max(0.0, self._tools_until - time.monotonic())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs `work` in an event loop of its own, and returns what it does; where it was cut, the process ends."""

        async def guarded() -> Any:
            task = asyncio.current_task()
            assert task is not None
            self.watch(task)
            try:
                return await work
            except asyncio.CancelledError:
                # Threads may still be inside the learner: leave without waiting for them.
                with suppress(OSError, AttributeError):  # nobody reads it, or there is none
                    sys.stdout.flush()
                self.leave()
            except BaseExceptionGroup as group:
                # The second: nobody reads standard output any more.
                told = group.subgroup((GspoAgentError, BrokenPipeError))
                raise _first(told or group) from (None if told else group)
            finally:
                self.release()

        return asyncio.run(guarded())

    def watch(self, task: asyncio.Task[object]) -> None:
        """From now on signals cut `task`, which runs in this thread's event loop."""
        self._task, self._loop = task, asyncio.get_running_loop()
        # Started now: a signal may find the main thread inside any lock, that of starting threads too.
        threading.Thread(target=self._end_in_time, name="interruption", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with nohup: it is to outlive its terminal
            # Not the loop's own handlers: those are heard only when no callback keeps the loop busy.
            self._before[number] = signal.signal(number, self.cut)

    def release(self) -> None:
        """Signals do again what they did before; a process that has got this far ends by itself."""
        self._released.set()
        self._cut.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def cut(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """What a signal does."""
        if self._cut.is_set():
            self.leave()
        self._tools_until = time.monotonic() + (0.0 if number == signal.SIGINT else self._grace)
        self._cut.set()
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def leave(self) -> None:
        """Ends the process without waiting for anything."""
        try:
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)
            os.write(2, f"{self._goodbye}\n".encode())
        finally:  # also where nobody reads any more: the terminal is closed, the end of the pipe gone
            os._exit(CUT)

    def _end_in_time(self) -> None:
        self._cut.wait()
        if not self._released.wait(self.grace + _LEAVE_SECONDS):
            self.leave()


def _first(error: BaseException) -> BaseException:
    """Of a group; it ended the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
