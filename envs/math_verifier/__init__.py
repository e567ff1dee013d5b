"""A verified answer and an optional Python tool: `environment.py`; its own procedural tasks: `problems.py`."""

from envs.math_verifier.environment import MathVerifier
from envs.math_verifier.problems import Problems

__all__ = ["MathVerifier", "Problems"]
