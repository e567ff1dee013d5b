"""A server with SGLang's wire, deterministic and without a model, from which faults can be ordered."""

from gspo_agent.testing.sglang_server.faults import WRONG, Fault
from gspo_agent.testing.sglang_server.router import SGLangRouter
from gspo_agent.testing.sglang_server.server import Received, SGLangServer

__all__ = ["WRONG", "Fault", "Received", "SGLangRouter", "SGLangServer"]
