"""A coding agent's environment: `environment.py`; its own procedural tasks: `compositions.py`."""

from envs.code_sandbox.compositions import Compositions
from envs.code_sandbox.environment import CodeSandbox

__all__ = ["CodeSandbox", "Compositions"]
