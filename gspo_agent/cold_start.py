"""A model for the CPU: a small Qwen3 that is taught the environment's format and habits before GSPO improves them.

What it is taught is what the environment's `demonstration` shows, in the order of its `progress`; nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, Qwen3ForCausalLM

from gspo_agent import chat as chat_room
from gspo_agent import tiny
from gspo_agent.chat import load_chat
from gspo_agent.config import ColdStart
from gspo_agent.env import EnvFactory
from gspo_agent.errors import written
from gspo_agent.messages import Message

Demonstration = tuple[list[Message], list[dict[str, Any]]]
Example = tuple[list[int], list[bool]]
"""Token ids, and which of them the assistant wrote."""

_MAKING, _SECONDS_UNTIL_STALE = ".making-", 24 * 3600.0
_CHAPTERS = 20
_WARM_UP, _DECAY = 30, 0.4
"""Steps of the warm-up; share of the steps over which the learning rate falls to 0."""
_MUON_LR = 7.0
"""Muon's learning rate, as a multiple of AdamW's."""


def make_model(
    config: ColdStart,
    env_factories: Sequence[EnvFactory],
    seed: int,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Makes a model and its tokenizer, or finds the one that was made from the same things before.

    Args:
        env_factories: Give the demonstrations, in turn. ConfigError where an environment has none.
        cache_dir: By default `gspo_agent/models` in the user's cache directory. It may be deleted at any time.
        progress: Called with (done, total) training steps.

    Returns: A transformers directory. The same arguments and versions give the same weights on the same machine.
    """
    cache = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo_agent" / "models"
    made = cache / _digest(config, env_factories, seed)
    if made.exists():
        return made
    with written(cache):
        cache.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=_MAKING, dir=cache))
    _sweep(cache)
    try:
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.manual_seed(seed)
            _make(config, env_factories, random.Random(seed), making, progress)
        if not made.exists():  # another process may have been faster
            making.rename(made)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return made


def _sweep(cache: Path) -> None:
    """Deletes what a kill left of other models. One that is still being made is younger."""
    for leftover in cache.glob(f"{_MAKING}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _SECONDS_UNTIL_STALE:
                shutil.rmtree(leftover)


def _make(
    config: ColdStart,
    env_factories: Sequence[EnvFactory],
    rng: random.Random,
    directory: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    shown = [
        env_factories[number % len(env_factories)].demonstration(rng, number / config.demonstrations)
        for number in range(config.demonstrations)
    ]
    # Any demonstration will do for the tokenizer, and one in five is plenty.
    tokenizer = tiny.train_tokenizer(
        [tiny.render(messages, tools) for messages, tools in shown[::5]], config.vocab_size, directory
    )
    model = Qwen3ForCausalLM(tiny.make_config(config, len(tokenizer)))
    model.config.save_pretrained(directory)  # the chat is chosen by it
    chat = load_chat(directory)
    examples = [chat.conversation(messages, tools) for messages, tools in shown]
    _train(model, examples, config, rng, progress)
    model.save_pretrained(directory)


@contextmanager
def _one_thread() -> Iterator[None]:
    """At this size a second thread costs more than it brings: ten times more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    model: Qwen3ForCausalLM,
    examples: Sequence[Example],
    config: ColdStart,
    rng: random.Random,
    progress: Callable[[int, int], None] | None,
) -> None:
    optimisers = _optimisers(model, config.lr)
    # A mean over each batch's own tokens would give the tokens of short conversations more weight, and so choose
    # between the habits that are shown.
    tokens_in_a_batch = config.batch_size * sum(sum(written) for _, written in examples) / len(examples)
    model.train()
    for step, batch in enumerate(_batches(examples, config.steps, config.batch_size, rng)):
        rate = min(1.0, (step + 1) / _WARM_UP, (1 - step / config.steps) / _DECAY)
        token_ids, written = _padded(batch)
        hidden = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        scores = model.lm_head(hidden[written[:, 1:]])
        loss = cross_entropy(scores, token_ids[:, 1:][written[:, 1:]], reduction="sum") / tokens_in_a_batch
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, lr in optimisers:
            optimiser.param_groups[0]["lr"] = lr * rate
            optimiser.step()
            optimiser.zero_grad()
        if progress is not None:
            progress(step + 1, config.steps)


def _optimisers(model: PreTrainedModel, lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices inside the layers, AdamW for the rest, each with its learning rate.

    With AdamW alone a model of this size learns to copy after several times as many steps, or not at all.
    """
    parameters = dict(model.named_parameters())
    inner = {name for name, value in parameters.items() if value.ndim == 2 and "embed" not in name}
    matrices = [value for name, value in parameters.items() if name in inner]
    rest = [value for name, value in parameters.items() if name not in inner]
    return [
        (torch.optim.Muon(matrices, lr=_MUON_LR * lr, weight_decay=0.01), _MUON_LR * lr),
        (torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), lr),
    ]


def _batches(examples: Sequence[Example], steps: int, size: int, rng: random.Random) -> Iterator[list[Example]]:
    """`steps` batches of conversations of like length, chapter by chapter in the order of the demonstrations."""
    chapters = min(_CHAPTERS, steps, len(examples))
    for chapter in range(chapters):
        first, last = (len(examples) * edge // chapters for edge in (chapter, chapter + 1))
        num_batches = steps * (chapter + 1) // chapters - steps * chapter // chapters
        drawn: list[Example] = []
        while len(drawn) < num_batches * size:
            drawn += rng.sample(examples[first:last], last - first)
        drawn = sorted(drawn[: num_batches * size], key=lambda example: len(example[0]))
        edges = list(pairwise(range(0, num_batches * size + 1, size)))
        rng.shuffle(edges)
        for start, end in edges:
            yield drawn[start:end]


def _padded(batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] token ids and [B, T] what is learned; padding is on the right, where causal attention never sees it."""
    length = max(len(token_ids) for token_ids, _ in batch)
    token_ids = torch.zeros(len(batch), length, dtype=torch.long)
    written = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, (ids, mask) in enumerate(batch):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        written[row, : len(mask)] = torch.tensor(mask)
    return token_ids, written


def _digest(config: ColdStart, env_factories: Sequence[EnvFactory], seed: int) -> str:
    """Of everything that the model depends on: settings, seed, environments, and the code that makes it."""
    sources = {Path(__file__), Path(tiny.__file__), *Path(str(chat_room.__file__)).parent.glob("*.py")}
    for factory in env_factories:
        if factory.env_type is not None:
            home = Path(inspect.getfile(factory.env_type))
            # An environment that is a package is all of its files.
            sources |= set(home.parent.glob("*.py")) if (home.parent / "__init__.py").exists() else {home}
    parts = {
        "config": config.model_dump(mode="json", exclude={"seed"}),
        "seed": seed,
        "envs": [[factory.config.id, factory.config.options] for factory in env_factories],
        "versions": [version(name) for name in ("torch", "transformers", "tokenizers", "renderers")],
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
