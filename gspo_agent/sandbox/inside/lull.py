"""The time between two questions to a program, in which it uses no processor.

Threads and processes that it started are stopped at once, and the program itself when no question comes for a while: it
may only seem to wait, or have set a timer.
"""

from __future__ import annotations

import os
import select
import signal

from . import frames
from .dialogue import Dialogue, Job
from .watch import TICK_MS


class Lull:
    """Takes the questions to a dialogue's program from its job's channel."""

    def __init__(self, job: Job, dialogue: Dialogue) -> None:
        self._job, self._dialogue = job, dialogue
        self._questions = frames.Incoming()
        self._coming = select.poll()
        self._coming.register(job.channel, select.POLLIN)
        self._stopped = False

    def begin(self) -> None:
        """After an answer."""
        if self._dialogue.alive and not waits_only(self._job, self._dialogue.pid):
            self._stop()

    def end(self) -> bytes:
        """Waits for a question; then the program goes on."""
        if self._dialogue.alive and not self._stopped and not self._coming.poll(TICK_MS):
            self._stop()
        _, blobs = frames.unpack(self._questions.wait(self._job.channel))
        if self._stopped:
            self._job.enclosure.signal(signal.SIGCONT)
            self._stopped = False
        return blobs[0]

    def _stop(self) -> None:
        self._job.enclosure.signal(signal.SIGSTOP)
        self._stopped = True


def waits_only(job: Job, pid: int) -> bool:
    """Whether the program, which now waits for its next question, has one thread and is the only one."""
    if job.enclosure.newest() == pid:
        return True
    one_thread = os.stat(f"/proc/{pid}/task").st_nlink == 3
    return one_thread and len(job.enclosure.processes()) == 1
