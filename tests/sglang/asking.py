"""What the tests ask of real servers, and with which models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.engine.sglang import SGLangEngine
from tests.engine.models import qwen3
from tests.sglang.real import PYTHON, RealServer

ON_REAL_SERVERS = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="SGLANG_PYTHON names no interpreter"),
    pytest.mark.timeout(900),
]
VOCAB = 512
PROMPT = [1, 2, 3, 4, 5]


def model(seed: int) -> Qwen3ForCausalLM:
    return qwen3(seed, vocab_size=VOCAB, max_position_embeddings=4096)


@asynccontextmanager
async def opened(servers: list[RealServer], **options: object) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine([one.url for one in servers], vocab_size=VOCAB, **options)  # type: ignore[arg-type]
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


def weights(directory: Path, version: int) -> Weights:
    return Weights(version, directory / f"step-{version % 10}", lambda: ())


def tokens(completion: Completion) -> list[int]:
    return [int(token) for segment in completion.segments for token in segment.token_ids]


def logprobs(completion: Completion) -> np.ndarray:
    return np.concatenate([segment.logprobs for segment in completion.segments])


async def ask(engine: SGLangEngine, id: str, count: int = 64, prompt: list[int] = PROMPT) -> Completion:
    return await engine.generate(prompt, Sampling(count, 1.0, ()), request_id=id)


async def whole(
    engine: SGLangEngine, id: str, count: int, parts: list[Completion] | None = None
) -> tuple[list[int], list[Completion]]:
    """Asks on until `count` tokens are there, as an episode does; `parts` grows meanwhile."""
    ids, parts = list(PROMPT), [] if parts is None else parts
    while len(ids) < len(PROMPT) + count:
        parts.append(await ask(engine, f"{id}-{len(parts)}", count - len(ids) + len(PROMPT), ids))
        ids += tokens(parts[-1])
    return ids, parts


def cut(completion: Completion, end: int) -> bool:
    """Whether somebody ended it: a server also ends a request at its model's own end token."""
    return completion.finish_reason == "abort" and (not completion.segments or tokens(completion)[-1] != end)
