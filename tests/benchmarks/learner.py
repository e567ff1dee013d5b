"""Tokens per CPU second of a training step: `python -m tests.benchmarks.learner`.

The shapes are those of the calculator example: 32 groups of 8, a prompt of 60 to 110 tokens, one to four turns of about
12 sampled and 8 environment tokens; a Qwen3 of 0.37 M parameters, four mini-batches, one thread. Real tokens are
counted, not padding.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_agent.learner.batch import make_batch
from gspo_agent.learner.learner import Learner, micro_batches
from gspo_agent.learner_config import LearnerConfig
from gspo_agent.trajectory import Group, Reward, Segment, Trajectory, weight_version

VOCAB = 1024


def model(path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def groups(draw: random.Random, *, num_groups: int = 32, size: int = 8) -> list[Group]:
    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    made = []
    for group in range(num_groups):
        members = []
        prompt = ids(60, 110)
        for index in range(size):
            trajectory = Trajectory(group, index, 0, 0, rewards=[Reward(None, float(draw.random() < 0.5))])
            trajectory.append(Segment(prompt))
            for turn in range(draw.choice([1, 2, 2, 3, 4])):
                sampled = ids(6, 18)
                logprobs = np.full(len(sampled), -np.log(VOCAB))
                trajectory.append(Segment(sampled, "policy", logprobs, weight_version(1, 0), turn))
                trajectory.append(Segment(ids(4, 12), turn=turn))
            members.append(trajectory)
        made.append(Group(group, {}, members))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = groups(random.Random(0))
    begun = time.process_time()
    batch = make_batch(data, step=1, max_weight_lag=8, advantage_std=True)
    print(f"make_batch: {time.process_time() - begun:.3f} CPU s, {len(batch)} rows")
    tokens = int(batch.lengths.sum())
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder))
        for limit in options.micro_batch_tokens:
            config = LearnerConfig(lr=5e-4, micro_batch_tokens=limit, device="cpu")
            learner = Learner(config, path, temperature=1.0, total_steps=100, seed=0)
            learner.step(batch)
            parts = [part for mini in learner._mini_batches(batch) for part in micro_batches(mini, limit)]
            padded = sum(part.inputs.numel() for part in parts)
            profile = cProfile.Profile()
            if options.profile:
                profile.enable()
            begun = time.process_time()
            for _ in range(options.steps):
                learner.step(batch)
            seconds = (time.process_time() - begun) / options.steps
            profile.disable()
            print(
                f"micro_batch_tokens {limit}: {tokens / seconds:.0f} tokens per CPU second ({seconds:.2f} s a step; "
                f"{tokens} tokens in {len(parts)} micro-batches, padding {1 - tokens / padded:.0%})"
            )
            if options.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
