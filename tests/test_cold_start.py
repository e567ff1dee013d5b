"""Making a model: once for the same things, whole or not at all, in the order of the demonstrations."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_agent.chat import load_chat
from gspo_agent.cold_start import Example, _batches, _padded, make_model
from gspo_agent.config import ColdStart, EnvConfig
from gspo_agent.env import EnvFactory, ToolEnv
from gspo_agent.errors import ConfigError, JournalError
from gspo_agent.messages import assistant, user

SMALL = ColdStart(
    hidden_size=16, layers=1, heads=2, kv_heads=1, ffn_size=32, vocab_size=600,
    demonstrations=60, batch_size=4, steps=12,
)  # fmt: skip


class Repeat(ToolEnv):
    """Says a word back."""

    def __init__(self, word: str = "fig") -> None:
        super().__init__()

    def prompt(self, task: dict[str, Any]) -> str:
        return "Say it."

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 1.0

    @classmethod
    def demonstration(cls, rng: random.Random, progress: float, *, word: str = "fig") -> Any:
        return [user(f"Say {word} {rng.randint(0, 9)}."), assistant(word)], []


def factory(word: str = "fig", env: type = Repeat) -> EnvFactory:
    return EnvFactory(EnvConfig(id="repeat", options={"word": word}), env)


def test_a_model_is_made_once_and_loads_with_its_chat(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = make_model(SMALL, [factory()], 0, cache_dir=tmp_path, progress=lambda *at: seen.append(at))
    assert seen == [(step, 12) for step in range(1, 13)]
    weights = (made / "model.safetensors").read_bytes()
    assert make_model(SMALL, [factory()], 0, cache_dir=tmp_path, progress=lambda *at: seen.append(at)) == made
    assert len(seen) == 12
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.config.vocab_size == load_chat(made).vocab_size
    assert make_model(SMALL, [factory()], 0, cache_dir=tmp_path / "other").name == made.name
    assert (tmp_path / "other" / made.name / "model.safetensors").read_bytes() == weights


def test_everything_that_a_model_depends_on_makes_another_one(tmp_path: Path) -> None:
    longer = SMALL.model_copy(update={"steps": 3})
    short = SMALL.model_copy(update={"steps": 2})
    made = {
        make_model(short, [factory()], 0, cache_dir=tmp_path),
        make_model(longer, [factory()], 0, cache_dir=tmp_path),
        make_model(short, [factory()], 1, cache_dir=tmp_path),
        make_model(short, [factory("date")], 0, cache_dir=tmp_path),
    }
    assert len(made) == 4


def test_what_is_interrupted_leaves_nothing_behind_and_the_callers_randomness_as_it_was(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        make_model(SMALL, [factory()], 0, cache_dir=tmp_path, progress=stop)
    assert list(tmp_path.iterdir()) == []
    assert torch.rand(1) == expected


def test_an_environment_without_demonstrations_is_named(tmp_path: Path) -> None:
    class Silent(ToolEnv):
        def __init__(self, word: str = "") -> None:
            super().__init__()

    with pytest.raises(ConfigError, match=r"repeat: a cold start needs its classmethod demonstration"):
        make_model(SMALL, [factory(env=Silent)], 0, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_loss_falls_on_what_is_demonstrated(tmp_path: Path) -> None:
    config = SMALL.model_copy(update={"steps": 150, "lr": 1e-2})
    made = make_model(config, [factory()], 0, cache_dir=tmp_path)
    chat = load_chat(made)
    ids, written = chat.conversation([user("Say fig 3."), assistant("fig")], [])
    model = AutoModelForCausalLM.from_pretrained(made)
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    given = [logprobs[at - 1, ids[at]].item() for at in range(1, len(ids)) if written[at]]
    assert min(given) > -0.5


def test_batches_follow_the_demonstrations_and_hold_conversations_of_like_length() -> None:
    rng = random.Random(0)
    examples: list[Example] = [([number] * rng.randint(1, 30), [True]) for number in range(400)]
    batches = list(_batches(examples, steps=40, size=8, rng=rng))
    assert len(batches) == 40
    assert all(len(batch) == 8 for batch in batches)
    for number, batch in enumerate(batches):
        chapter = number // 2
        assert all(20 * chapter <= ids[0] < 20 * (chapter + 1) for ids, _ in batch)
    spread = [max(len(ids) for ids, _ in b) - min(len(ids) for ids, _ in b) for b in batches]
    assert sum(spread) / len(spread) < 20
    assert len(list(_batches(examples[:3], steps=7, size=8, rng=rng))) == 7


def test_padding_is_never_learned() -> None:
    ids, written = _padded([([7, 8, 9], [False, True, True]), ([5], [True])])
    assert ids.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert written.tolist() == [[False, True, True], [True, False, False]]


def test_what_a_kill_left_is_swept_once_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".making-old", tmp_path / ".making-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    make_model(SMALL, [factory()], 0, cache_dir=tmp_path)
    assert not old.exists()
    assert young.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/cache cannot be written: Not a directory"):
        make_model(SMALL, [factory()], 0, cache_dir=tmp_path / "file" / "cache")
