"""Small random models, and groups whose logprobs an incremental forward pass reported, as an engine does."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gspo_agent.trajectory import Group, Reward, Segment, Status, Trajectory, weight_version

VOCAB = 96


def qwen3(seed: int = 0, *, vocab_size: int = VOCAB, tie: bool = True) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        initializer_range=0.2,  # spread logits: a flat softmax would hide mistakes
    )
    return Qwen3ForCausalLM(config).eval()


def saved_qwen3(path: Path, seed: int = 0) -> Path:
    qwen3(seed).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@torch.no_grad()
def sample(
    model: PreTrainedModel, token_ids: list[int], count: int, temperature: float, draw: torch.Generator
) -> Segment:
    """`count` tokens after `token_ids`, one at a time over a cache."""
    new, logprobs, fresh = [], [], torch.tensor([token_ids])
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache = {name: DynamicCache(config=model.config)}
    for _ in range(count):
        output = model(input_ids=fresh, use_cache=True, **cache)
        scores = torch.log_softmax(output.logits[0, -1].float() / temperature, -1)
        token = int(torch.multinomial(scores.exp(), 1, generator=draw))
        new.append(token)
        logprobs.append(float(scores[token]))
        fresh = torch.tensor([[token]])
    return Segment(new, "policy", logprobs, weight_version(1, 0))


def sampled_groups(
    model: PreTrainedModel,
    *,
    groups: int = 4,
    size: int = 4,
    turns: int = 3,
    temperature: float = 1.0,
    seed: int = 0,
    max_turn: int = 12,
) -> list[Group]:
    """Multi-turn episodes at version (1, 0), of uneven length; the reward is the share of even tokens."""
    draw = torch.Generator().manual_seed(seed)

    def number(high: int) -> int:
        return int(torch.randint(1, high + 1, (1,), generator=draw))

    made = []
    for group in range(groups):
        members = []
        for index in range(size):
            trajectory = Trajectory(group, index, 0, seed=index, status=Status.TERMINATED)
            for turn in range(turns):
                trajectory.append(Segment([number(model.config.vocab_size - 1) for _ in range(number(9))], turn=turn))
                ids = trajectory.token_ids().tolist()
                segment = sample(model, ids, number(max_turn), temperature, draw)
                trajectory.append(Segment(segment.token_ids, "policy", segment.logprobs, segment.weight_version, turn))
            sampled = trajectory.rows()[0]
            share = float((sampled.token_ids[sampled.sampled] % 2 == 0).mean())
            trajectory.rewards.append(Reward(None, share))
            members.append(trajectory)
        made.append(Group(group, {}, members))
    return made
