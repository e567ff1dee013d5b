"""Scenario: what a run is like before anything is done to it; a function of the campaign's seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("sync", "carry_over", "async")
_WORLDS = {"till": 6, "forgetful": 1, "bench": 2, "clerk": 2, "guess": 2}
"""World -> how often it is drawn."""


@dataclass(frozen=True, slots=True)
class Scenario:
    engine: str = "scripted"
    """"scripted" or "local"."""
    mode: str = "carry_over"
    world: str = "till"
    expired: str = "mask"
    checkpoint_every: int = 1
    journal_tokens: int = 16
    max_weight_lag: int = 8
    over_provision: float = 1.5
    durability: str = "process"
    seed: int = 0
    keep_steps: int | str = "all"
    export: bool = False
    learns: bool = False
    """Of the local engine: weights change with each step, so that there is no uncut twin to compare with."""
    delay: float = 0.001
    """Seconds between two chunks of the scripted engine."""
    chunk: int = 4
    turn_tokens: int = 400
    group_size: int = 3
    grace: float = 0.5

    @classmethod
    def draw(
        cls, draw: random.Random, engine: str | None = None, mode: str | None = None, world: str | None = None
    ) -> Scenario:
        chosen = engine or ("local" if draw.random() < 0.2 else "scripted")
        return cls(
            engine=chosen,
            mode=mode or draw.choice(MODES),
            world=world or draw.choices([*_WORLDS], [*_WORLDS.values()])[0],
            expired=draw.choice(("mask", "reroll", "keep")),
            checkpoint_every=draw.choice((1, 1, 3)),
            journal_tokens=draw.choice((8, 16, 64)),
            max_weight_lag=draw.choice((1, 2, 8)),
            over_provision=draw.choice((1.0, 1.5, 2.0)),
            durability=draw.choice(("process", "process", "power")),
            seed=draw.randrange(1 << 20),
            keep_steps=draw.choice(("all", "all", 0, 2)),
            export=draw.random() < 0.6,
            learns=draw.random() < 0.3,
            delay=draw.choice((0.0, 0.001, 0.003)),
        )

    def config(self, model: Path, run: Path, steps: int) -> dict[str, Any]:
        """What `Config.parse` takes."""
        local = self.engine == "local"
        turn, context = (20, 1600) if local else (self.turn_tokens, 8192 + self.turn_tokens)
        return {
            "model": str(model),
            "env": [{"id": self.world, "limits": {"turns": 6, "turn_tokens": turn, "context_tokens": context}}],
            "rollout": {
                "mode": self.mode,
                "expired": self.expired,
                "group_size": self.group_size,
                "groups_per_step": 2,
                "max_attempts": 30,
                "max_failed": 1.0,
                "over_provision": self.over_provision,
                "journal_tokens": self.journal_tokens,
                "max_weight_lag": self.max_weight_lag,
            },
            # So small a step changes no float32 weight: every version samples the same.
            "learner": {"lr": 3e-3 if self.learns else 1e-30, "mini_batches": 1, "device": "cpu"},
            "run": {
                "dir": str(run),
                "steps": steps,
                "seed": self.seed,
                "checkpoint_every": self.checkpoint_every,
                "keep_checkpoints": 2,
                "durability": self.durability,
                "keep_steps": self.keep_steps,
                "export": self.export,
                "grace": self.grace,
            },
            "evaluation": {"episodes": 0},
        }

    def __str__(self) -> str:
        parts = [
            self.engine, self.mode, self.world, f"expired={self.expired}", f"checkpoint_every={self.checkpoint_every}",
            f"journal_tokens={self.journal_tokens}", f"lag={self.max_weight_lag}", self.durability,
            f"keep_steps={self.keep_steps}",
        ]  # fmt: skip
        return " ".join(
            [
                *parts,
                *(["export"] if self.export else []),
                *(["learns"] if self.learns and self.engine == "local" else []),
            ]
        )
