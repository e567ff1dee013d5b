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
    """As `gspo_agent.config.SandboxConfig` explains them."""

    backend: Backend = "auto"
    python: str = ""
    image: str = ""
    command: str = "docker"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"unknown sandbox backend {self.backend!r}; known are {', '.join(BACKENDS)}")

    @property
    def interpreter(self) -> str:
        return os.path.realpath(self.python or sys.executable)
