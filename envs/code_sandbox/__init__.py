"""A coding agent's environments: programs (`environment.py`, its procedural tasks in `compositions.py`), repositories
(`workspace.py`)."""

from envs.code_sandbox.compositions import Compositions
from envs.code_sandbox.environment import CodeSandbox
from envs.code_sandbox.workspace import Workspace

__all__ = ["CodeSandbox", "Compositions", "Workspace"]
