"""Who has a run, as far as that can be told from outside: running, stopped, died, or silent."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from gspo_agent.rollout import lock

_FLOCK = "hhqqi"  # struct flock of Linux: type, whence, start, length, pid


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of a run's newest life."""

    life: int
    host: str
    pid: int
    seen: float
    """Its last sign of life, in seconds since the epoch."""
    ended: bool
    """It wrote down that it stopped."""

    def state(self, journal: Path) -> str:
        """ "running", "stopped", "died", or "silent": it may live, and shows no sign of it."""
        if self.ended:
            return "stopped"
        held = _held(journal)
        if not held and self.host == socket.gethostname():
            return "died"
        if time.time() - self.seen <= lock.EXPIRY:
            return "running"
        return "silent"


def _held(journal: Path) -> bool:
    """Whether a process, on this host or on one whose locks are seen from here, has the run's lock."""
    path = lock.path_of(journal)
    if path in lock.held:  # closing any descriptor of it would drop our own lock
        return True
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(file)
