"""An environment's `np_random`: made late, and as JSON and back."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from gspo_agent.env.state import decode, encode


class LateGenerator(gymnasium.Env[Any, Any]):
    """Makes `np_random` when something is first drawn, as few environments do. Until then its seed is its state."""

    _np_generator: np.random.Generator | None = None

    @property
    def _np_random(self) -> np.random.Generator | None:
        """What gymnasium keeps there."""
        if self._np_generator is None and self._np_random_seed is not None:
            self._np_generator, _ = seeding.np_random(self._np_random_seed)
        return self._np_generator

    @_np_random.setter
    def _np_random(self, value: np.random.Generator | None) -> None:
        self._np_generator = value

    def _seed(self, seed: int | None) -> None:
        """What gymnasium's `reset` does with it, and raises."""
        if type(seed) is int and seed >= 0:
            self._np_generator, self._np_random_seed = None, seed
        else:
            gymnasium.Env.reset(self, seed=seed)


class GeneratorEncoder:
    """Encodes a generator at every snapshot; where nothing was drawn since the last one, that one's JSON serves."""

    def __init__(self) -> None:
        self._state: Any = None
        self._json: Any = None

    def encode(self, generator: np.random.Generator | None, seed: int | None) -> Any:
        """`seed` is that of a generator that is still to be made."""
        state = generator.bit_generator.state if generator is not None else None if seed is None else {"seed": seed}
        try:
            same = bool(state == self._state)
        except ValueError:  # with an array in it, as MT19937 has, there is no one answer
            same = False
        if not same:
            self._state, self._json = state, encode(state, "np_random")
        return self._json


def decode_generator(data: Any) -> tuple[np.random.Generator | None, int | None]:
    """The arguments of `GeneratorEncoder.encode`."""
    if data is None:
        return None, None
    state = decode(data)
    if "seed" in state:
        return None, state["seed"]
    bits = getattr(np.random, state["bit_generator"])(0)  # seeded, or it would ask the system for entropy
    bits.state = state
    return np.random.Generator(bits), -1
