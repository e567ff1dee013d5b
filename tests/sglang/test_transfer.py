"""Weights that reach real SGLang servers without a file between; `.ci/sglang` runs it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gspo_agent.engine.base import Weights
from gspo_agent.engine.delivery import Transport
from gspo_agent.engine.publish import publish
from gspo_agent.engine.sender import Sender
from gspo_agent.learner.process import LearnerProcess
from gspo_agent.learner_config import LearnerConfig
from gspo_agent.tiny import train_tokenizer
from tests.engine.models import scored
from tests.sglang.asking import ON_REAL_SERVERS, PROMPT, VOCAB, logprobs, opened, whole
from tests.sglang.real import RealServer

pytestmark = ON_REAL_SERVERS
SMALL = 20_000  # bytes: a model of 0.3 MB goes in many buckets


def model(seed: int) -> LlamaForCausalLM:
    """Of the architecture whose weights SGLang reads back, Qwen3's it does not."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.04, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transfer")
    for step in (0, 1):
        train_tokenizer(["<|im_start|>system\nthe next key is 12<|im_end|>\n" * 50], VOCAB, path / f"step-{step}")
        model(step).save_pretrained(path / f"step-{step}")
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    with RealServer(directory / "step-0", directory / "a.log") as one:
        one.wait()
        yield one


def sent(of: LlamaForCausalLM, version: int) -> Weights:
    sender = Sender(lambda: of.state_dict().items(), torch.device("cpu"))
    sender.hold(version)
    return Weights(version, None, lambda: (), lambda function, *arguments: function(sender, *arguments))


def read_back(server: RealServer, name: str) -> np.ndarray[Any, Any]:
    body = json.dumps({"name": name, "truncate_size": 1_000_000}).encode()
    request = urllib.request.Request(f"{server.url}/get_weights_by_name", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return np.array(json.load(answer), np.float32)


def assert_has(server: RealServer, of: LlamaForCausalLM) -> None:
    for name, tensor in of.state_dict().items():
        if name != "lm_head.weight":
            assert np.array_equal(read_back(server, name), tensor.numpy()), name


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
@pytest.mark.parametrize("max_bytes", [SMALL, 1 << 29])
async def test_every_value_of_the_learners_process_is_the_servers(
    server: RealServer, directory: Path, kind: Any, max_bytes: int
) -> None:
    before = model(0) if max_bytes == SMALL else model(2)
    how = {"temperature": 1.0, "total_steps": 1, "seed": 0}
    learner = LearnerProcess(LearnerConfig(device="cpu"), directory / "step-1", **how)
    try:
        async with opened([server], transport=Transport(kind, max_bytes, 60.0)) as engine:
            await publish(sent(before, 20), engine)
            assert_has(server, before)
            await publish(learner.weights(21), engine)
            assert_has(server, model(1))
            ids, parts = await whole(engine, "0.0.0/0", 40)
    finally:
        learner.close()
    assert {segment.weight_version for part in parts for segment in part.segments} == {21}
    expected = scored(model(1), [ids], 1.0)[0][len(PROMPT) - 1 :].numpy()
    assert np.abs(np.concatenate([logprobs(part) for part in parts]) - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_weights_change_under_requests_and_every_token_has_its_version(
    server: RealServer, mode: Any, kind: Any
) -> None:
    async with opened([server], pause_mode=mode, transport=Transport(kind, SMALL, 60.0)) as engine:
        await publish(sent(model(0), 10), engine)
        asked = [asyncio.create_task(whole(engine, f"{n}.0.0/0", 400)) for n in range(8)]
        await asyncio.sleep(0.7)
        await publish(sent(model(1), 11), engine)
        done = await asyncio.gather(*asked)
    both = 0
    for ids, parts in done:
        assert len(ids) == len(PROMPT) + 400
        segments = [segment for part in parts for segment in part.segments]
        seen = [int(segment.weight_version or 0) for segment in segments]
        assert seen == sorted(seen)
        both += set(seen) == {10, 11}
        position = len(PROMPT)
        for segment, version in zip(segments, seen, strict=True):
            if mode != "in_place":  # what stays computed under older weights moves the logprobs of newer tokens
                expected = scored(model(version % 10), [ids], 1.0)[0].numpy()
                there = expected[position - 1 : position - 1 + len(segment)]
                assert np.abs(segment.logprobs - there).max() < 1e-3  # type: ignore[operator]
            position += len(segment)
    assert both >= 4
