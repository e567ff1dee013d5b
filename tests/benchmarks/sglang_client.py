"""What SGLangEngine costs around HTTP: CPU per request, beside a bare aiohttp call with the same body and reply.

    python -m tests.benchmarks.sglang_client [--requests 512] [--tokens 64] [--prompt 256] [--in-flight 64]
        [--stream]

The fault-injecting server runs in a process of its own. Both ways take turns in one run; the bare one encodes the
bodies that the engine sent, posts them, and parses the same JSON. Both are measured in CPU seconds of this process.
With `--stream` the engine's requests are streamed, and the bare ones are not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson

from gspo_agent.engine.base import Sampling
from gspo_agent.engine.request import PLAIN
from gspo_agent.engine.sglang import SGLangEngine

AIM = 1.5
VOCAB = 50_000
Ask = Callable[[int], Awaitable[int]]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "gspo_agent.testing.sglang_server", "--vocab-size", str(VOCAB)]
    command += ["--chunk", "64", "--incremental-streaming-output"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


async def spent(ask: Ask, requests: Sequence[int], in_flight: int) -> tuple[float, float]:
    """CPU and wall seconds of these requests, so many of them at once."""
    waiting = iter(requests)

    async def work() -> int:
        return sum([await ask(number) for number in waiting])

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return time.process_time() - cpu, time.perf_counter() - wall


async def main(requests: int, tokens: int, prompt: int, in_flight: int, rounds: int, stream: bool) -> None:
    random = np.random.default_rng(0)
    prompts = random.integers(0, VOCAB, (requests, prompt), dtype=np.int32)
    bodies = [body(prompts[number].tolist(), tokens, number) for number in range(requests)]
    with server() as url:
        engine = SGLangEngine([url], vocab_size=VOCAB, weight_version=0, stream=stream)
        await engine.open()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ours(number: int) -> int:
                sampling = Sampling(tokens, seed=number)
                completion = await engine.generate(prompts[number], sampling, request_id=f"run.{number}.0.0-{number}/")
                return sum(map(len, completion.segments))

            async def bare(number: int) -> int:
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{url}/generate", data=orjson.dumps(bodies[number]), headers=headers) as reply:
                    answer = orjson.loads(await reply.read())
                return len(answer["output_ids"])

            cpu: dict[str, list[float]] = {"engine": [], "bare": []}
            wall: dict[str, list[float]] = {"engine": [], "bare": []}
            for number in range(-2, 2 * rounds):
                # Bare, engine, engine, bare, ...: a drift of the machine meets both alike. The first two warm up.
                name, ask = ("engine", ours) if number % 4 in (1, 2) else ("bare", bare)
                if number >= 0:
                    each = await spent(ask, range(requests), in_flight)
                    cpu[name].append(each[0] / requests)
                    wall[name].append(each[1] / requests)
                else:
                    await spent((ours, bare)[number], range(requests), in_flight)
        await engine.close()
    for name in cpu:
        each, seconds = statistics.median(cpu[name]), statistics.median(wall[name])
        print(f"{name:6}  {1e6 * each:.0f} us of CPU a request, {1 / seconds:,.0f} requests/s")
    ratios = [ours / theirs for ours, theirs in zip(cpu["engine"], cpu["bare"], strict=True)]
    print(
        f"ratio   {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), aim {AIM}; "
        f"{requests} requests of {prompt} + {tokens} tokens, {in_flight} at once, {rounds} rounds"
    )


def body(prompt: list[int], tokens: int, number: int) -> dict[str, Any]:
    """As the engine writes it."""
    return {
        "rid": f"run.{number}.0.0-{number}/~1~",
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": tokens,
            "temperature": 1.0,
            "stop_token_ids": [],
            "sampling_seed": number,
            **PLAIN,
        },
        "return_logprob": True,
        "extra_key": "weights default",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="the engine's requests are streamed")
    parser.add_argument("--rounds", type=int, default=24, help="of each way")
    options = parser.parse_args()
    asyncio.run(main(**vars(options)))
