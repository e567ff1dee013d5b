"""Real servers, started once for all tests of the folder, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gspo_agent.tiny import train_tokenizer
from tests.sglang.asking import VOCAB, model
from tests.sglang.real import RealServer


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of one tokenizer and different weights: step-0, step-1, step-2."""
    path = tmp_path_factory.mktemp("sglang")
    text = "<|im_start|>system\nthe next key is 12<|im_end|>\n<|im_start|>assistant\n" * 50
    for step in (0, 1, 2):
        train_tokenizer([text], VOCAB, path / f"step-{step}")
        model(step).save_pretrained(path / f"step-{step}")
    return path


@pytest.fixture(scope="session")
def end(directory: Path) -> int:
    """The model's own end token."""
    return int(AutoTokenizer.from_pretrained(directory / "step-0").eos_token_id)


@pytest.fixture(scope="session")
def servers(directory: Path) -> Iterator[list[RealServer]]:
    """Two, of the same weights, that stream increments."""
    with (
        RealServer(directory / "step-0", directory / "a.log", "--incremental-streaming-output") as first,
        RealServer(directory / "step-0", directory / "b.log", "--incremental-streaming-output") as second,
    ):
        first.wait()
        second.wait()
        yield [first, second]
