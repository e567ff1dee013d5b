"""How a user chooses what isolates."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from gspo_agent.errors import ConfigError

Backend = Literal["auto", "ns", "landlock", "container", "unsafe"]
BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The section [sandbox] of a configuration."""

    backend: Backend = "auto"
    """"auto": the first of "ns" and "landlock" whose escape cases all fail here."""
    python: str | None = None
    """The interpreter that runs jobs, 3.11 or newer; None: this one."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"unknown sandbox backend {self.backend!r}; known are {', '.join(BACKENDS)}")

    @property
    def interpreter(self) -> str:
        return os.path.realpath(self.python or sys.executable)
