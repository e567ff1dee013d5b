"""Whether this machine, and not the code, is to blame for what became of a job."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

KILLED = "killed"
"""The status of a program that SIGKILL ended and its supervisor did not send."""
DIRECTORY = Path("/proc/pressure")
_HIGH = 20.0  # per cent of the last ten seconds in which something waited


def under_pressure() -> bool:
    """As the kernel's pressure stall information says; False where it says nothing."""
    for name in ("cpu", "memory", "io"):
        with suppress(OSError, ValueError, IndexError):
            some = (DIRECTORY / name).read_text().split("avg10=")[1].split()[0]
            if float(some) > _HIGH:
                return True
    return False


def is_suspect(status: str, cpu_s: float, max_cpu_s: float) -> bool:
    """Whether it is worth another try: what passed a limit may have waited for the machine, and not for itself; what
    was killed may have been the kernel's choice when memory ran out."""
    return status == KILLED or (status == "time_limit" and cpu_s < max_cpu_s / 2 and under_pressure())
