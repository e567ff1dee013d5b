from __future__ import annotations

import numpy as np
import torch

from gspo_agent.engine.prefix_cache import BLOCK, PrefixCache


def ids(*parts: range) -> np.ndarray:
    return np.concatenate([np.array(part, np.int32) for part in parts])


def put(cache: PrefixCache, token_ids: np.ndarray) -> None:
    cache.put(token_ids, [torch.zeros(1, len(token_ids), 4)])


def test_the_longest_common_prefix_is_found_to_the_token() -> None:
    cache = PrefixCache(10**6)
    put(cache, ids(range(50)))
    put(cache, ids(range(20), range(100, 130)))
    for query, known in (
        (ids(range(60)), 50),
        (ids(range(40)), 40),
        (ids(range(37), range(5)), 37),
        (ids(range(20), range(100, 113), range(3)), 33),
        (ids(range(BLOCK - 1)), 0),
        (ids(range(1, 40)), 0),
    ):
        entry, length = cache.find(query)
        assert length == known
        if entry is not None:
            assert (entry.token_ids[:length] == query[:length]).all()


def test_what_is_continued_is_let_go() -> None:
    cache = PrefixCache(10**6)
    put(cache, ids(range(32)))
    put(cache, ids(range(64)))
    put(cache, ids(range(64)))
    assert len(cache) == 1
    assert cache.num_bytes == 64 * 16
    put(cache, ids(range(48), range(200, 210)))
    assert len(cache) == 2
    assert cache.find(ids(range(64)))[1] == 64


def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    cache = PrefixCache(3 * 32 * 16)
    for start in (0, 100, 200):
        put(cache, ids(range(start, start + 32)))
    assert cache.find(ids(range(32)))[1] == 32
    put(cache, ids(range(300, 332)))
    assert cache.num_bytes == 3 * 32 * 16
    assert [cache.find(ids(range(start, start + 32)))[1] for start in (0, 100, 200, 300)] == [32, 0, 32, 32]
    put(cache, ids(range(1000)))
    assert len(cache) == 3
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.find(ids(range(32)))) == (0, 0, (None, 0))
