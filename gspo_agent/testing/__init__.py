"""Small real implementations for tests, the framework's own and its users'."""

from gspo_agent.testing.byte_chat import ByteChat
from gspo_agent.testing.scripted import ScriptedEngine

__all__ = ["ByteChat", "ScriptedEngine"]
