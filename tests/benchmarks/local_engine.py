"""Tokens per CPU second of the local engine, beside transformers' own ways to generate the same requests.

    python -m tests.benchmarks.local_engine [--requests 32 128] [--models 0.7M 23M] [--continuous]

Lengths are those of calculator episodes: prompts of 40 to 150 tokens, turns of 8 to 40, 2 to 4 turns with tool
results of 8 to 30 tokens in between. `generate` gets all requests of one turn as one left-padded batch, samples, and
runs until the longest is done; tokens past a request's own length do not count. "shared" gives eight requests each
prompt, as the groups of GSPO do. Only CPU time of this process is counted; each figure is the best of --repeat runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gspo_agent.engine.base import Sampling
from gspo_agent.engine.local import LocalEngine

VOCAB = 1024
MODELS = {
    "0.7M": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256},
    "23M": {"hidden_size": 512, "num_hidden_layers": 7, "num_attention_heads": 8, "intermediate_size": 1536},
}
Request = tuple[list[int], int]


def make_model(size: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = MODELS[size]
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    return Qwen3ForCausalLM(config).eval()


def make_requests(count: int, *, siblings: int = 1, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(40, 150))] for _ in range(count // siblings)]
    return [(prompt, rng.randint(8, 40)) for prompt in prompts for _ in range(siblings)]


def static(model: PreTrainedModel, requests: list[Request]) -> None:
    """`generate` on one left-padded batch, sampling."""
    width = max(len(prompt) for prompt, _ in requests)
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    longest = max(count for _, count in requests)
    model.generate(padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=longest)


def continuous(model: PreTrainedModel, requests: list[Request]) -> None:
    """transformers' continuous batching, logprobs on."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=True, max_new_tokens=40, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(return_logprobs=True)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    for n, (prompt, count) in enumerate(requests):
        manager.add_request(prompt, request_id=str(n), max_new_tokens=count)
    for _ in requests:
        manager.get_result(timeout=600)
    manager.stop(block=True)


def local(model: PreTrainedModel, requests: list[Request]) -> None:
    async def run() -> None:
        engine = LocalEngine(model)
        await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(count, seed=n), request_id=str(n))
                for n, (prompt, count) in enumerate(requests)
            )
        )
        await engine.close()

    asyncio.run(run())


def episodes(model: PreTrainedModel, count: int) -> tuple[int, dict[str, int]]:
    """Whole episodes of 2 to 4 turns through the local engine, in groups of eight; sampled tokens and its counts."""

    async def run() -> tuple[int, dict[str, int]]:
        engine = LocalEngine(model)

        async def episode(n: int, ids: list[int]) -> int:
            rng, sampled = random.Random(n), 0
            for turn in range(rng.randint(2, 4)):
                sampling = Sampling(rng.randint(8, 40), seed=n)
                completion = await engine.generate(ids, sampling, request_id=f"{n}/{turn}")
                turn_ids = [int(token) for segment in completion.segments for token in segment.token_ids]
                ids = [*ids, *turn_ids, *(rng.randrange(1, VOCAB) for _ in range(rng.randint(8, 30)))]
                sampled += len(turn_ids)
            return sampled

        prompts = [prompt for prompt, _ in make_requests(count, siblings=8)]
        sampled = await asyncio.gather(*(episode(n, prompt) for n, prompt in enumerate(prompts)))
        await engine.close()
        return sum(sampled), engine.stats()

    return asyncio.run(run())


def rate(
    run: Callable[[PreTrainedModel, list[Request]], None], model: PreTrainedModel, requests: list[Request]
) -> float:
    start = time.process_time()
    run(model, requests)
    return sum(count for _, count in requests) / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--continuous", action="store_true", help="also transformers' continuous batching: slow")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("tokens per CPU second, one thread; the ratio is local / generate")
    for size in options.models:
        model = make_model(size)
        for count in options.requests:
            for name, siblings in (("distinct", 1), ("shared", 8)):
                requests = make_requests(count, siblings=siblings)
                # Alternating, so that a busy neighbour slows both.
                pairs = [(rate(static, model, requests), rate(local, model, requests)) for _ in range(options.repeat)]
                theirs, ours = (max(figures) for figures in zip(*pairs, strict=True))
                line = f"{size:>5} {count:4} requests, {name:>8}: generate {theirs:6.0f}  local {ours:6.0f}"
                print(f"{line}  ratio {ours / theirs:.2f}", flush=True)
            if options.continuous:
                print(f"{'':>10} continuous batching {rate(continuous, model, make_requests(count)):6.0f}", flush=True)
            start = time.process_time()
            sampled, stats = episodes(model, count)
            speed = sampled / (time.process_time() - start)
            print(f"{size:>5} {count:4} episodes of 2 to 4 turns: local {speed:6.0f}  {stats}", flush=True)


if __name__ == "__main__":
    main()
