"""Adapters on a real SGLang server; `.ci/sglang` runs it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from gspo_agent.engine.adapter import adapter_of, save_adapter
from gspo_agent.engine.base import Weights
from gspo_agent.engine.model import load_model
from gspo_agent.engine.publish import publish
from gspo_agent.learner_config import LoRAConfig
from gspo_agent.testing.sglang_server import SGLangServer
from tests.engine.models import scored
from tests.sglang.asking import ON_REAL_SERVERS, PROMPT, VOCAB, logprobs, opened, weights, whole
from tests.sglang.real import RealServer
from tests.sglang.test_likeness import ASKED, call, foreign

pytestmark = ON_REAL_SERVERS
LORA = LoRAConfig(rank=8, alpha=16.0)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    options = ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native"]
    options += ["--lora-target-modules", *LORA.targets]
    with RealServer(directory / "step-0", directory / "lora.log", *options) as one:
        one.wait()
        yield one


def trained(directory: Path, version: int) -> PreTrainedModel:
    """As the learner has it: the model, frozen, and an adapter after some steps."""
    learned = load_model(directory / "step-0", LORA)
    torch.manual_seed(version)
    for tensor in adapter_of(learned).values():
        tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return learned


def adapter(directory: Path, version: int) -> Weights:
    path = directory / f"adapter-{version}"
    path.mkdir(exist_ok=True)
    save_adapter(trained(directory, version), LORA, str(directory / "step-0"), path)
    return Weights(version, path, lambda: ())


def listed(server: RealServer) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
        return [model["id"].partition("@")[0] for model in json.load(answer)["data"] if model["parent"]]


async def test_log_s_is_zero_for_every_version_of_an_adapter_that_changes_under_requests(
    server: RealServer, directory: Path
) -> None:
    async with opened([server]) as engine:
        await publish(adapter(directory, 1), engine)
        asked = [asyncio.create_task(whole(engine, f"{n}.0.0/0", 400)) for n in range(8)]
        for version in (2, 3):
            await asyncio.sleep(1.0)
            await publish(adapter(directory, version), engine)
        done = await asyncio.gather(*asked)
        assert engine.stats()["versions_from_adapter"] >= 8
    assert listed(server) == ["2", "3"]
    models = {version: trained(directory, version) for version in (1, 2, 3)}
    seen, log_s = set(), []
    for ids, parts in done:
        assert len(ids) == len(PROMPT) + 400
        position = len(PROMPT)
        for segment in (segment for part in parts for segment in part.segments):
            version = int(segment.weight_version or 0)
            expected = scored(models[version], [ids], 1.0)[0].numpy()[position - 1 : position - 1 + len(segment)]
            log_s.append(abs(float(np.mean(expected - np.asarray(segment.logprobs)))))
            position += len(segment)
            seen.add(version)
    assert len(seen) > 1
    assert max(log_s) < 1e-5
    print(f"versions {sorted(seen)}, |log s| at most {max(log_s):.2g} in {len(log_s)} segments")


async def test_the_fault_injecting_server_takes_adapters_as_the_real_one_does(
    server: RealServer, directory: Path
) -> None:
    path = str(adapter(directory, 9).path)
    first, gone = {"lora_name": "first"}, {"lora_name": "first", "lora_path": f"{directory}/none"}
    named = {**ASKED, "lora_path": "first"}
    calls: list[tuple[str, dict[str, Any] | None]] = [
        ("POST /load_lora_adapter", gone), ("POST /generate", named), ("POST /unload_lora_adapter", first),
        ("POST /load_lora_adapter", {**first, "lora_path": path}), ("POST /generate", named), ("GET /v1/models", None),
        ("POST /load_lora_adapter", {**first, "lora_path": path}), ("POST /unload_lora_adapter", first),
        ("POST /unload_lora_adapter", first), ("POST /generate", named), ("POST /unload_lora_adapter", first),
    ]  # fmt: skip
    differences: list[str] = []
    async with SGLangServer(None, vocab_size=VOCAB, lora=True) as ours, aiohttp.ClientSession() as session:
        for number, (line, body) in enumerate(calls):
            mine, real = [await call(session, url, line, body, directory) for url in (ours.url, server.url)]
            if mine[0] != real[0]:
                differences.append(
                    f"{number}, {line}: status {mine[0]} {mine[1]!r:.200}, not {real[0]} {real[1]!r:.200}"
                )
            elif real[0] == 200 and line != "POST /unload_lora_adapter":
                differences += foreign(mine[1], real[1], f"{number}, {line}")
    assert not differences, "\n".join(differences)


async def test_a_server_that_had_whole_weights_is_given_the_model_again(server: RealServer, directory: Path) -> None:
    async with opened([server]) as other:
        await publish(weights(directory, 12), other)
    async with opened([server]) as engine:
        await publish(adapter(directory, 4), engine)
        ids, parts = await whole(engine, "0.0.0/0", 80)
    expected = scored(trained(directory, 4), [ids], 1.0)[0][len(PROMPT) - 1 :].numpy()
    assert np.abs(np.concatenate([logprobs(part) for part in parts]) - expected).max() < 1e-4
    assert listed(server) == ["4"]
