"""Reinforcement learning of multi-turn, tool-using language models: durable partial rollouts and GSPO.

>>> from gspo_agent import Config, Run, train
>>> train(Config.load("shop.toml"), env=Shop)
>>> Run.open("runs/shop").status()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_agent.config import Config
    from gspo_agent.env import Env, ToolEnv, tool
    from gspo_agent.run import Run
    from gspo_agent.trainer import train

__version__ = "0.1.0"
__all__ = ["Config", "Env", "Run", "ToolEnv", "__version__", "tool", "train"]

_ROOMS = {"Config": "config", "Env": "env", "Run": "run", "ToolEnv": "env", "tool": "env", "train": "trainer"}


def __getattr__(name: str) -> Any:
    """Opens a room when it is first asked for: whoever writes an environment does not wait for torch."""
    if name in _ROOMS:
        return getattr(import_module(f"gspo_agent.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
