"""A training run that is sent a signal when it enters a phase: python -m tests.signalled RUN_DIR SIGNAL PHASE ..."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gspo_agent.interruption import Interruption
from gspo_agent.monitor.screen import Screen
from gspo_agent.trainer import train_async
from tests.test_trainer import config


class Signalling(Screen):
    """Sends this process a signal when a phase begins whose name begins with `at`."""

    number, at = signal.SIGTERM, ""

    def phase(self, text: str) -> None:
        super().phase(text)
        if self.at and text.startswith(self.at):
            os.kill(os.getpid(), self.number)


if __name__ == "__main__":
    directory, number, at, *overrides = sys.argv[1:]
    cut = config(Path(directory), *overrides)
    screen = Signalling(cut)
    screen.number, screen.at = signal.Signals[number], at
    interruption = Interruption(cut.run.grace, "stopped; the same line goes on from here")
    interruption.run(train_async(cut, screen=screen, interruption=interruption))
