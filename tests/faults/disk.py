"""A small disk that can be full: a tmpfs of its own where this process may mount one, else a limit on file sizes."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from pathlib import Path

SMALL_DISK = "campaign"
"""The name in the first column of the table of mounts."""


class Disk:
    """A directory with at most `megabytes` in it, if it is `real`; `close` takes it away with all that is in it."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", SMALL_DISK, str(path)]
        self.real = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self, pid: int, leave: int) -> None:
        """Leaves room for `leave` bytes; without a disk of its own, `pid` may not make any file longer than now."""
        if not self.real:
            largest = max((file.stat().st_size for file in self.path.rglob("*") if file.is_file()), default=0)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest + leave, resource.RLIM_INFINITY))
            return
        with (self.path / "filler").open("wb", buffering=0) as file:
            block = 1 << 20
            while block >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, block)
                except OSError:
                    block //= 2
            file.truncate(max(0, os.fstat(file.fileno()).st_size - leave))

    def relieve(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        if self.real:
            subprocess.run(["umount", "-l", str(self.path)], check=False)
