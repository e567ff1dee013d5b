"""Keys and values of finished work, found again by the tokens they belong to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16
"""Tokens between two points at which a prefix is indexed."""


def block_keys(token_ids: NDArray[np.int32]) -> Iterator[bytes]:
    """The index keys of all whole blocks, longest first: each is the bytes of everything up to there."""
    raw, size = token_ids.tobytes(), BLOCK * token_ids.itemsize
    for end in range(len(raw) // size * size, 0, -size):
        yield raw[:end]


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence and, per layer, its keys and values, [heads, L, dim] each."""

    token_ids: NDArray[np.int32]
    """[L]"""
    tensors: Sequence[Tensor]
    keys: set[bytes] = field(default_factory=set)
    """Where the index points here; an entry that nothing points to is gone."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PrefixCache:
    """Bounded, least recently used first out. Belongs to one weight version: whoever changes weights clears it.

    A sequence is indexed at every whole block, so that any later sequence with a common beginning finds it: the next
    turn of an episode, the siblings of a group, other tasks with the same system prompt.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._index: dict[bytes, Entry] = {}
        self._entries: OrderedDict[int, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, token_ids: NDArray[np.int32]) -> tuple[Entry | None, int]:
        """The entry with the longest known common prefix, and that prefix's length."""
        for key in block_keys(token_ids):
            entry = self._index.get(key)
            if entry is not None:
                self._entries.move_to_end(id(entry))
                return entry, _common(entry.token_ids, token_ids, len(key) // token_ids.itemsize)
        return None, 0

    def put(self, token_ids: NDArray[np.int32], tensors: Sequence[Tensor]) -> None:
        """Keeps a sequence; entries that it continues are let go, since everything in them is in it too."""
        entry = Entry(token_ids, tensors)
        if len(token_ids) < BLOCK or entry.num_bytes > self.max_bytes:
            return
        self._entries[id(entry)] = entry
        self.num_bytes += entry.num_bytes
        for key in block_keys(token_ids):
            earlier = self._index.get(key)
            if earlier is not None:
                earlier.keys.discard(key)
                if not earlier.keys:
                    self._drop(earlier)
            self._index[key] = entry
            entry.keys.add(key)
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries.values())))

    def clear(self) -> None:
        self._index.clear()
        self._entries.clear()
        self.num_bytes = 0

    def _drop(self, entry: Entry) -> None:
        del self._entries[id(entry)]
        self.num_bytes -= entry.num_bytes
        for key in entry.keys:
            del self._index[key]


def _common(ours: NDArray[np.int32], theirs: NDArray[np.int32], known: int) -> int:
    """Length of the common prefix, of which `known` tokens are known to agree."""
    end = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[known:end] != theirs[known:end])
    return known + int(differ[0]) if len(differ) else end
