"""Isolated execution of untrusted code. `inside/` is what runs behind the walls; the rest is the trainer's side."""

from gspo_agent.sandbox.image import Image
from gspo_agent.sandbox.limits import SandboxLimits
from gspo_agent.sandbox.observation import readable
from gspo_agent.sandbox.results import CallResult, CellResult, CommandResult, RunResult
from gspo_agent.sandbox.sandbox import Sandbox, marks, share, shared_sandbox
from gspo_agent.sandbox.session import Session
from gspo_agent.sandbox.settings import SandboxSettings
from gspo_agent.sandbox.testfile import TestFile, TestFileResult

__all__ = [
    "CallResult",
    "CellResult",
    "CommandResult",
    "Image",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "SandboxSettings",
    "Session",
    "TestFile",
    "TestFileResult",
    "marks",
    "readable",
    "share",
    "shared_sandbox",
]
