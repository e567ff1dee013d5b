"""What the framework costs around an engine: CPU per turn, beside a bare HTTP loop that sends the same requests.

    python -m tests.benchmarks.orchestration [--episodes 512] [--tokens 414] [--without-journal [--repeats 5]]

An instant server in a process of its own answers from a script, in SGLang's JSON. The framework runs whole episodes
through environment, chat, collector and journal; the bare loop then posts the very requests that were recorded, with
the same concurrency, and parses the same JSON. Both are measured in CPU seconds of this process, in one run, and both
pay for a garbage collector that walks the objects of every imported library. Where an aim is missed, a table says
where the CPU went.

With `--without-journal` the episodes are played again and again, in turn by the collector as it is and by one that
keeps everything in memory only; the ratio is what the journal costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import multiprocessing
import pstats
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from gspo_agent.background import rare_collections
from gspo_agent.chat import load_chat
from gspo_agent.config import EnvConfig, Limits, RolloutConfig
from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.env import EnvFactory, ToolEnv, tool
from gspo_agent.messages import assistant, call, system, tool_result, user
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.tasks import TaskSource
from gspo_agent.tiny import train_tokenizer
from gspo_agent.trajectory import Segment
from tests.benchmarks.cpu_by_room import CpuByRoom, GarbageClock
from tests.benchmarks.unwritten import UnwrittenCollector, UnwrittenLedger

TURNS = 4
GROUP = 8
AIMS = ((7200, 1.5), (0, 2.0))  # from so many sampled tokens an episode on, at most so often the bare loop's CPU
IN_FLIGHT = 512
JOURNAL_AIM = 0.15  # of the turns per second, at most


class Lookup(ToolEnv):
    """Three look-ups and an answer."""

    def prompt(self, task: dict[str, Any]) -> str:
        return f"What is behind key {task['key']}?"

    @tool
    async def look(self, key: int) -> str:
        """Look one key up."""
        return f"the next key is {key + 1}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(task["key"] % 2)

    def sample_task(self) -> dict[str, Any]:
        return {"key": 1}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        return [{"key": key} for key in range(1000)]


class HttpEngine:
    """The smallest client of an SGLang-wire server that keeps the engine's contract."""

    name = "policy"
    weight_version = 1_000_000
    context_tokens = 65_536
    turn = contextlib.nullcontext()

    def __init__(self, url: str, vocab_size: int, session: aiohttp.ClientSession) -> None:
        self.url, self.vocab_size, self.session = url, vocab_size, session
        self.requests: dict[str, list[dict[str, Any]]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
        request = {
            "rid": request_id,
            "input_ids": ids,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature},
        }
        self.requests.setdefault(request_id.split("-")[0], []).append(request)
        answer = await post(self.session, self.url, request)
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        segment = Segment(answer["output_ids"], self.name, logprobs, self.weight_version)
        return Completion((segment,), answer["meta_info"]["finish_reason"]["type"])

    async def abort(self, request_id: str) -> None: ...
    async def clear(self, prefix: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, weights: Weights) -> None: ...
    async def close(self) -> None: ...


async def post(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=orjson.dumps(request), headers=headers) as response:
        return orjson.loads(await response.read())


def serve(port: Any, start_id: int, header: int, script: list[list[int]]) -> None:
    """The instant server: the turn and the place in it follow from the prompt alone."""

    async def generate(http: web.Request) -> web.Response:
        request = orjson.loads(await http.read())
        ids = request["input_ids"]
        turn = script[(ids.count(start_id) - 3) // 2]
        offset = ids[::-1].index(start_id) - header
        new = turn[offset : offset + request["sampling_params"]["max_new_tokens"]]
        finish = "stop" if offset + len(new) == len(turn) else "length"
        meta = {
            "id": request["rid"],
            "finish_reason": {"type": finish},
            "weight_version": "1000000",
            "output_token_logprobs": [[-0.5, token, None] for token in new],
        }
        return web.Response(body=orjson.dumps({"output_ids": new, "meta_info": meta}), content_type="application/json")

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def make_tokenizer(directory: Path) -> None:
    from transformers import Qwen3Config

    text = "<|im_start|>system\nthe next key is 12<|im_end|>\n<|im_start|>assistant\n" * 50
    train_tokenizer([text], 512, directory)
    Qwen3Config(vocab_size=512).save_pretrained(directory)


def script_of(chat: Any, tokens: int) -> tuple[int, int, list[list[int]]]:
    """Three turns that call the tool and a last one that answers, each of `tokens` / 4 tokens."""
    tools = [Lookup.look.schema]
    turns = []
    for turn in range(TURNS):
        size = 8
        while True:
            message = assistant("key " * size, [call("look", key=turn)] if turn < TURNS - 1 else None)
            messages = [system("s"), user("q"), message, tool_result("x")]
            ids, written = chat.conversation(messages if turn < TURNS - 1 else messages[:3], tools)
            sampled = [token for token, mine in zip(ids, written, strict=True) if mine]
            if len(sampled) >= tokens // TURNS:
                break
            size += max(1, (tokens // TURNS - len(sampled)) // 4)
        turns.append(sampled)
    prompt = chat.open([user("q")], [])
    start = prompt[0]
    return start, len(prompt) - 1 - max(i for i, token in enumerate(prompt) if token == start), turns


async def framework(
    engine: HttpEngine,
    chat: Any,
    directory: Path,
    episodes: int,
    turn_tokens: int,
    rooms: CpuByRoom | None,
    written: bool = True,
) -> tuple[float, float, int]:
    """CPU seconds, wall seconds and turns of whole episodes; without the journal where they are not `written`."""
    config = RolloutConfig(
        group_size=GROUP, groups_per_step=episodes // GROUP, over_provision=1.0, max_in_flight=IN_FLIGHT
    )
    factory = EnvFactory(EnvConfig(id="tests.benchmarks.orchestration:Lookup"), Lookup)
    tasks = TaskSource.open(factory, "train", seed=0, base_dir=directory)
    limits = Limits(turns=8, turn_tokens=turn_tokens * 2, context_tokens=60_000)
    with Journal.open(directory / "journal.sqlite", durability="process") as journal:
        collector = (Collector if written else UnwrittenCollector)(
            journal=journal,
            ledger=(Ledger if written else UnwrittenLedger)(journal),
            sources=[Source(factory=factory, tasks=tasks, limits=limits, weight=1.0)],
            chat=chat,
            engine=engine,
            config=config.model_copy(update={"filter_zero_variance": False}),
            seed=0,
        )
        cpu, wall = time.process_time(), time.perf_counter()
        with rooms or contextlib.nullcontext():
            await collector.start(0)
            lease = await collector.lease(episodes // GROUP, step=1)
        spent = time.process_time() - cpu, time.perf_counter() - wall
        await collector.stop()
    turns = sum(m["role"] == "assistant" for g in lease.groups for t in g.trajectories for m in t.messages)
    sampled = sum(t.num_sampled for g in lease.groups for t in g.trajectories)
    done = sum(len(g.trajectories) for g in lease.groups)
    text = f"{done} episodes, {turns / done:.1f} turns and {sampled / done:.0f} sampled tokens each"
    print(text if written else f"{text}, unwritten")
    return *spent, turns


async def bare(engine: HttpEngine) -> tuple[float, float]:
    """CPU and wall seconds of the recorded requests alone, every episode's one after the other."""

    async def episode(requests: list[dict[str, Any]]) -> None:
        for request in requests:
            answer = await post(engine.session, engine.url, request)
            assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])

    recorded = list(engine.requests.values())
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(episode(requests) for requests in recorded))
    return time.process_time() - cpu, time.perf_counter() - wall


async def journal_cost(
    engine: HttpEngine, chat: Any, directory: Path, episodes: int, tokens: int, repeats: int
) -> None:
    """Plays with and without the journal in turn; what both ways share, the noise of the machine above all, cancels."""
    cpu: dict[bool, list[float]] = {True: [], False: []}
    wall: dict[bool, list[float]] = {True: [], False: []}

    async def play(written: bool, rooms: CpuByRoom | None) -> tuple[float, float, int]:
        engine.requests.clear()
        with tempfile.TemporaryDirectory(dir=directory) as name, rare_collections():  # as in a run
            played = await framework(engine, chat, Path(name), episodes, tokens // TURNS, rooms, written)
        gc.collect()
        return played

    for number in range(-1, 2 * repeats):
        # Without, with, with, without, ...: a drift of the machine meets both alike. The very first warms up.
        written = number % 4 in (1, 2)
        spent_cpu, spent_wall, turns = await play(written, None)
        if number >= 0:
            cpu[written].append(1000 * spent_cpu / turns)
            wall[written].append(1000 * spent_wall / turns)
    for name, spent in (("CPU", cpu), ("wall", wall)):
        with_it, without = statistics.median(spent[True]), statistics.median(spent[False])
        pairs = ", ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(spent[True], spent[False], strict=True))
        print(f"{name:4}  {with_it:.3f} ms a turn with the journal, {without:.3f} without   ({pairs})")
        print(
            f"      the journal costs {1 - without / with_it:.1%} of the turns per {name} second, aim {JOURNAL_AIM:.0%}"
        )
    # By themselves: samples are taken with the interpreter's lock, which the writer then has to win back more often.
    for written in (True, False):
        rooms = CpuByRoom()
        *_, turns = await play(written, rooms)
        print(f"CPU ms a turn by room, {'with' if written else 'without'} the journal\n{rooms.table(turns)}")


async def main(episodes: int, tokens: int, profile: bool, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory)
        chat = load_chat(directory)
        start, header, script = script_of(chat, tokens)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, start, header, script))
        server.start()
        try:
            url = f"http://127.0.0.1:{ours.recv()}/generate"
            connector = aiohttp.TCPConnector(limit=256)
            async with aiohttp.ClientSession(connector=connector) as session:
                engine = HttpEngine(url, 512, session)
                if repeats:
                    await journal_cost(engine, chat, directory, episodes, tokens, repeats)
                    return
                profiler = cProfile.Profile()
                if profile:
                    profiler.enable()
                rooms, ours_garbage, bare_garbage = CpuByRoom(), GarbageClock(), GarbageClock()
                with ours_garbage:
                    ours_cpu, ours_wall, turns = await framework(
                        engine, chat, directory, episodes, tokens // TURNS, rooms
                    )
                if profile:
                    profiler.disable()
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
            # Connections of its own, so that both pay for opening them.
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256)) as engine.session:
                with bare_garbage:
                    bare_cpu, bare_wall = await bare(engine)
        finally:
            server.terminate()
            server.join()
    requests = sum(map(len, engine.requests.values()))
    for name, cpu, wall, garbage in (
        ("framework", ours_cpu, ours_wall, ours_garbage.seconds),
        ("bare loop", bare_cpu, bare_wall, bare_garbage.seconds),
    ):
        print(
            f"{name}  {1000 * cpu / turns:.3f} CPU ms a turn, {1000 * garbage / turns:.3f} of it garbage collection   "
            f"{turns / wall:,.0f} turns/s"
        )
    ratio, aim = ours_cpu / bare_cpu, next(aim for least, aim in AIMS if tokens >= least)
    without = (ours_cpu - ours_garbage.seconds) / (bare_cpu - bare_garbage.seconds)
    print(f"ratio      {ratio:.2f}, aim {aim}; {without:.2f} without garbage collection   ({requests} requests)")
    if ratio > aim:
        print(f"the framework's CPU ms a turn by room, to compare with the bare loop's\n{rooms.table(turns)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=414, help="sampled tokens an episode")
    parser.add_argument("--profile", action="store_true", help="print where the framework's CPU goes")
    parser.add_argument("--without-journal", action="store_true", help="measure what the journal costs")
    parser.add_argument("--repeats", type=int, default=5, help="how often with and without it")
    arguments = parser.parse_args()
    repeats = arguments.repeats if arguments.without_journal else 0
    asyncio.run(main(arguments.episodes, arguments.tokens, arguments.profile, repeats))
