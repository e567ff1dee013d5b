"""What a job may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_agent.errors import ConfigError

_MOST = 1 << 50  # what the kernel takes for each of them


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one run, of each call of a batch, or of each cell of a session."""

    cpu_s: float = 5.0
    """CPU seconds of the whole tree of processes."""
    wall_s: float = 15.0
    """Seconds on the clock; time spent waiting for a free processor, or for the job's turn, does not count."""
    memory_bytes: int = 512 << 20
    """Memory of the whole tree, shared pages counted once. Watched every 50 ms."""
    address_space_bytes: int = 2 << 30
    """Address space of one process; the kernel refuses more at once. Each thread's stack and heap reserve some."""
    output_bytes: int = 16 << 20
    """Standard output and standard error, each; also the largest file."""
    result_bytes: int = 8 << 20
    """The encoded answer of one function call."""
    disk_bytes: int = 64 << 20
    """All files of the work directory and /tmp, which live in memory."""
    files: int = 2000
    """Files and directories on that disk."""
    processes: int = 32
    """Processes and threads."""
    open_files: int = 256
    stack_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            if not 0 < value <= _MOST:
                raise ConfigError(f"sandbox limit {name} = {value!r} is not above 0 and at most {_MOST:,}")

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}  # `asdict` copies, at fifty times the cost
