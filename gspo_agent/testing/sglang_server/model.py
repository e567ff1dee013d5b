"""What the server samples: turns that are known beforehand, or ids drawn by a hash; and the prefixes it knows."""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from gspo_agent.testing.scripted import Answer

BLOCK = 16
"""Tokens between two points at which a prefix is found again."""


class Model:
    """Tokens that depend on (prompt, seed) alone: a request that goes on after a cut gets what an uncut one would have.

    With `answer`, a prompt whose begun turn is not what would have been sampled is refused, so a client that loses,
    repeats or edits a sampled token is found out at once.
    """

    def __init__(self, answer: Answer | None, turn_mark: int, vocab_size: int) -> None:
        self.answer, self.turn_mark, self.vocab_size = answer, turn_mark, vocab_size

    def tokens(self, prompt: Sequence[int], seed: int) -> Iterator[int]:
        """What comes after `prompt`; drawn where no turn has begun, as in a client's probe. Raises ValueError where the
        turn was begun otherwise than it was sampled."""
        drawn = self.answer is None or self.turn_mark not in prompt
        return self._drawn(prompt, seed) if drawn else iter(self._rest(prompt, seed))

    def _drawn(self, prompt: Sequence[int], seed: int) -> Iterator[int]:
        token, position = prompt[-1], len(prompt)
        while True:
            token = zlib.crc32(struct.pack("<3q", seed, position, token)) % self.vocab_size
            yield token
            position += 1

    def _rest(self, prompt: Sequence[int], seed: int) -> list[int]:
        assert self.answer is not None
        begin = len(prompt) - list(reversed(prompt)).index(self.turn_mark)
        turn, begun = list(self.answer(prompt[:begin], seed)), list(prompt[begin:])
        if turn[: len(begun)] != begun:
            raise ValueError(f"the turn was begun with {begun}, which is not what was sampled: {turn[: len(begun)]}")
        if len(begun) == len(turn):
            raise ValueError("asked to go on after the end of the turn")
        return turn[len(begun) :]


class PrefixCache:
    """Counts the tokens of a prompt that were computed before; least recently used blocks are dropped first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def known(self, token_ids: Sequence[int], namespace: str) -> int:
        """Tokens of the longest known prefix: never all of them, the last one has to be computed."""
        found = 0
        for key in self._keys(token_ids, namespace):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found += BLOCK
        return min(found, len(token_ids) - 1)

    def add(self, token_ids: Sequence[int], namespace: str) -> None:
        for key in self._keys(token_ids, namespace):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) * BLOCK > self.max_tokens:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    @staticmethod
    def _keys(token_ids: Sequence[int], namespace: str) -> Iterator[int]:
        key = hash(namespace)
        for end in range(BLOCK, len(token_ids) + 1, BLOCK):
            key = hash((key, *token_ids[end - BLOCK : end]))
            yield key
