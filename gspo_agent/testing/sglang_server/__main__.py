"""`python -m gspo_agent.testing.sglang_server --port P`: the server as a process of its own, without faults. It also
takes what `[engine.servers]` gives to every server, so `module = "gspo_agent.testing.sglang_server"` tries a
configuration without SGLang."""

from __future__ import annotations

import argparse
import asyncio
import signal

from gspo_agent.testing.sglang_server import SGLangServer


async def serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with SGLangServer(**vars(options)) as server:
        print(server.url, flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gspo_agent.testing.sglang_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one; the URL is printed")
    parser.add_argument("--model-path", default="scripted", help="what /model_info says")
    parser.add_argument("--tp-size", type=int, default=1, dest="ranks")
    parser.add_argument("--dp-size", type=int, default=1, choices=[1])
    parser.add_argument("--vocab-size", type=int, default=264)
    parser.add_argument("--context-tokens", type=int, default=1 << 20)
    parser.add_argument("--chunk", type=int, default=16, help="tokens per step")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per step")
    parser.add_argument("--max-running", type=int, default=None, help="more requests than this wait")
    parser.add_argument("--incremental-streaming-output", action="store_true", dest="incremental")
    parser.add_argument("--enable-lora", action="store_true", dest="lora")
    parser.add_argument("--max-lora-rank", type=int, default=None)
    parser.add_argument("--lora-target-modules", nargs="*")
    parser.add_argument("--version", default="0.5.23", help="what /server_info says")
    options = parser.parse_args()
    del options.dp_size, options.max_lora_rank, options.lora_target_modules
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
