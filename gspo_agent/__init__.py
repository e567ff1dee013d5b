"""Reinforcement learning of multi-turn, tool-using language models: durable partial rollouts and GSPO."""

__version__ = "0.1.0"
