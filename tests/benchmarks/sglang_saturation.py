"""How much of a real server's tokens a second is left behind the framework.

    SGLANG_PYTHON=.../python python -m tests.benchmarks.sglang_saturation [--episodes 96] [--in-flight 32] [--rounds 4]

Episodes of four turns with a policy that says anything, played by the collector and journaled; then a raw closed loop
over aiohttp that sends the same requests: as many at once, each episode's one after the other, each as long as the one
it stands for, each prompt made of what came and of the same tail. Both begin with an empty prefix cache and take turns
in one run; a ratio compares a raw pass with the passes of the framework before and after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson

from gspo_agent.config import EnvConfig, RolloutConfig
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.env import EnvFactory
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.tiny import train_tokenizer
from tests.benchmarks.sglang_client import spent
from tests.rollout.scene import Tasks
from tests.sglang.asking import VOCAB, model
from tests.sglang.episodes import AnyChat, Talk
from tests.sglang.real import PYTHON, RealServer

AIM = 0.95
GROUP = 8


class LongTurns(AnyChat):
    """Every 64th id ends a turn."""

    stop_token_ids = tuple(range(7, VOCAB, 64))


class Sent(NamedTuple):
    """One request, and how many tokens came."""

    body: dict[str, Any]
    tokens: int


Record = dict[str, list[Sent]]
"""Episode -> its requests, in order."""


class Pass(NamedTuple):
    tokens: int
    prompt: int
    cached: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return f"{self.rate:5.0f} tokens/s, {self.cached / self.prompt:.1%} of prompt tokens from the prefix cache"


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Its address."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text = "<|im_start|>system\nthe next key is 12<|im_end|>\n<|im_start|>assistant\n" * 50
        train_tokenizer([text], VOCAB, directory)
        model(0).save_pretrained(directory)
        with RealServer(directory, directory / "server.log") as real:
            real.wait()
            yield real.url


def record(engine: SGLangEngine, requests: Record) -> None:
    """Has every request of the engine's only server written down, with what came of it."""
    (worker,) = engine.fleet.workers
    send = worker.generate

    async def generate(body: bytes, session: str) -> dict[str, Any]:
        reply = await send(body, session)
        requests.setdefault(session, []).append(Sent(orjson.loads(body), len(reply["output_ids"])))
        return reply

    worker.generate = generate  # type: ignore[method-assign]


async def framework(engine: SGLangEngine, episodes: int, in_flight: int) -> Pass:
    config = RolloutConfig(
        group_size=GROUP,
        groups_per_step=episodes // GROUP,
        over_provision=1.0,
        max_in_flight=in_flight,
        filter_zero_variance=False,
    )
    before = engine.stats()
    with tempfile.TemporaryDirectory() as name, Journal.open(Path(name) / "journal.sqlite") as journal:
        factory = EnvFactory(EnvConfig(id="talk"), Talk)
        sources = [Source(factory, Tasks(), factory.config.limits)]
        ledger = Ledger(journal)
        collector = Collector(
            journal=journal, ledger=ledger, sources=sources, chat=LongTurns(), engine=engine, config=config, seed=0
        )
        began = time.perf_counter()
        await collector.start(0)
        await collector.lease(episodes // GROUP, step=1)
        seconds = time.perf_counter() - began
        await collector.stop()
    after = engine.stats()
    tokens, computed, cached = (after[n] - before[n] for n in ("tokens", "prefill_tokens", "cached_tokens"))
    return Pass(tokens, computed + cached, cached, seconds)


async def raw(url: str, requests: Record, in_flight: int) -> Pass:
    tokens = prompt = cached = 0
    episodes = list(requests.values())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def play(number: int) -> int:
            nonlocal tokens, prompt, cached
            said: list[int] = []  # what came, in the place of what had come in the recorded pass
            ids: list[int] = []
            known = 0
            for sent in episodes[number]:
                ids = [*ids, *said, *sent.body["input_ids"][known:]]
                known = len(ids) + sent.tokens
                sampling = {**sent.body["sampling_params"], "max_new_tokens": sent.tokens, "ignore_eos": True}
                sampling["stop_token_ids"] = []
                body = {**sent.body, "input_ids": ids, "sampling_params": sampling}
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{url}/generate", data=orjson.dumps(body), headers=headers) as answer:
                    reply = orjson.loads(await answer.read())
                said, meta = reply["output_ids"], reply["meta_info"]
                assert len(said) == len(meta["output_token_logprobs"]) == sent.tokens, meta
                tokens += len(said)
                prompt += meta["prompt_tokens"]
                cached += meta["cached_tokens"]
            return 0

        _, seconds = await spent(play, range(len(episodes)), in_flight)
    return Pass(tokens, prompt, cached, seconds)


async def flush(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache?timeout=10") as answer:
        assert answer.status == 200, await answer.text()


async def measure(url: str, episodes: int, in_flight: int, rounds: int) -> None:
    engine = SGLangEngine([url], vocab_size=VOCAB, context_tokens=4096, weight_version=0)
    await engine.open()
    requests: Record = {}
    record(engine, requests)
    ours: list[Pass] = []
    theirs: list[Pass] = []
    for number in range(-1, rounds + 1):  # the first warms up
        requests.clear()
        await flush(url)
        ours.append(await framework(engine, episodes, in_flight))
        print(f"framework  {ours[-1]}{'   (warming up)' if number < 0 else ''}", flush=True)
        if number < rounds:
            await flush(url)
            theirs.append(await raw(url, requests, in_flight))
            print(f"raw        {theirs[-1]}", flush=True)
    await engine.close()
    ratios = [ours[n + after].rate / theirs[n].rate for n in range(1, len(theirs)) for after in (0, 1)]
    sent = sum(map(len, requests.values()))
    print(
        f"ratio      {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), aim {AIM}; "
        f"{episodes} episodes, {in_flight} at once, {sent} requests, {ours[-1].tokens} tokens a pass"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4, help="raw passes, each between two of the framework")
    parser.add_argument("--url", help="of a server that is there already; None: one is started")
    options = parser.parse_args()
    if not (options.url or PYTHON):
        parser.error("SGLANG_PYTHON names no interpreter with SGLang")
    with server() if options.url is None else contextlib.nullcontext(options.url) as url:
        asyncio.run(measure(url, options.episodes, options.in_flight, options.rounds))


if __name__ == "__main__":
    main()
