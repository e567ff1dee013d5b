"""Environments: the contract, ToolEnv, what loads them and what checks them.

Importing this registers the installed environments with Gymnasium, so that `gymnasium.make` knows their ids.
"""

from gspo_agent.env.calls import call_id
from gspo_agent.env.check import check_env
from gspo_agent.env.contract import CallLog, CallMeta, Env, StateLevel
from gspo_agent.env.loading import EnvFactory, load_env, register_entry_points
from gspo_agent.env.tool_env import ToolEnv
from gspo_agent.env.wrapper import TextEnv
from gspo_agent.tools import Tool, tool

__all__ = [
    "CallLog",
    "CallMeta",
    "Env",
    "EnvFactory",
    "StateLevel",
    "TextEnv",
    "Tool",
    "ToolEnv",
    "call_id",
    "check_env",
    "load_env",
    "tool",
]

register_entry_points()
