"""Servers that are started here: what a death of any of their processes costs, and that none is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gspo_agent.engine.server import Condition, Server, command
from gspo_agent.engine.servers import Servers, read_servers
from gspo_agent.errors import EngineError
from gspo_agent.serving_config import ServersConfig
from tests.sandbox.survivors import alive, descendants

ROOT = Path(__file__).parents[2]


def config(**options: Any) -> ServersConfig:
    args = {"vocab_size": 264, "children": 2, **options.pop("args", {})}
    return ServersConfig(**{"module": "tests.engine.served", "args": args, "ready": 20, **options})


def servers_of(directory: Path, said: list[str] | None = None, **options: Any) -> Servers:
    tell = said.append if said is not None else lambda text: None
    return Servers(config(**options), Path("model"), directory, tell=tell, back_off=0.05, look_every=0.05)


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def processes(server: Server) -> set[int]:
    """Of its keeper, down to the last child."""
    return set() if server.pid is None else descendants(server.pid)


def main_process(server: Server) -> int:
    (pid,) = (int(line) for line in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
    return pid


def temporary_files(server: Server) -> Path:
    """Where it has them; there are some."""
    environment = Path(f"/proc/{main_process(server)}/environ").read_bytes().split(b"\0")
    (place,) = (line for line in environment if line.startswith(b"TMPDIR="))
    directory = Path(os.fsdecode(place.removeprefix(b"TMPDIR=")))
    assert len(list(directory.glob("*/file"))) == 1
    return directory


async def served_model(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/model_info") as answer:
        return str((await answer.json())["model_path"])


async def test_servers_are_ready_have_their_logs_and_leave_no_process(tmp_path: Path) -> None:
    said: list[str] = []
    async with servers_of(tmp_path, said, count=2) as servers:
        await servers.ready()
        assert servers.problems() == {}
        assert str(servers) == "2 ready"
        assert [await served_model(url) for url in servers.urls] == ["model", "model"]
        record = read_servers(tmp_path)
        assert [one["url"] for one in record["servers"]] == servers.urls
        every = set().union(*map(processes, servers.servers))
        assert len(every) == 2 * 4  # keeper, server, two children
    assert alive(every) == set()
    assert sorted(text.partition(" is ready after")[0] for text in said) == [one.name for one in servers.servers]
    assert "tests.engine.served --model-path model" in (tmp_path / "0.log").read_text()


@pytest.mark.parametrize("victim", ["server", "keeper"])
async def test_a_server_that_is_killed_is_started_again_on_its_port_without_a_trace_of_the_old_one(
    tmp_path: Path, victim: str
) -> None:
    async with servers_of(tmp_path, args={"children": 1, "litter": True}) as servers:
        await servers.ready()
        (server,) = servers.servers
        before, url = processes(server), server.url
        temporary_files(server)
        os.kill(main_process(server) if victim == "server" else server.pid or 0, signal.SIGKILL)
        await until(lambda: server.condition is not Condition.READY)
        await until(lambda: server.condition is Condition.READY)
        assert alive(before) == set()
        temporary_files(server)
        assert (server.url, await served_model(url)) == (url, "model")
        assert (tmp_path / "0.log").read_text().count("--- ") == 2


@pytest.mark.parametrize("depth", [0, 20])
async def test_temporary_files_of_a_server_lie_in_the_run_or_where_sockets_have_a_path_and_go_with_it(
    tmp_path: Path, depth: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        directory = Path(short) / ("long" * depth)
        async with servers_of(directory, args={"children": 0, "litter": True}) as servers:
            await servers.ready()
            made = temporary_files(servers.servers[0])
            assert (made.parent == directory.resolve()) is (depth == 0)
            assert len(os.fsencode(made)) <= 80
            os.kill(servers.servers[0].pid or 0, signal.SIGKILL)
            if depth:
                await until(lambda: not made.exists())
        assert not made.exists()


async def test_a_server_that_hangs_is_ended_and_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    async with servers_of(tmp_path, said, hang=0.3) as servers:
        await servers.ready()
        (server,) = servers.servers
        before = processes(server)
        os.kill(main_process(server), signal.SIGSTOP)
        await until(lambda: server.condition is not Condition.READY)
        await until(lambda: server.condition is Condition.READY)
        assert alive(before) == set()
    assert "answered nothing for" in said[1]


async def test_one_that_ends_at_its_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(EngineError, match=r"ended with status 1;.*0.log ends with\nthe model is broken"):
        async with servers_of(tmp_path, args={"broken": str(tmp_path / "broken")}) as servers:
            await servers.ready()
    assert alive(set(map(int, pids_of("tests.engine.served")))) == set()


async def test_an_interpreter_without_the_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"install it there .*engine.servers.python; .*0.log ends with"):
        async with servers_of(tmp_path, module="no_such_package.launch_server") as servers:
            await servers.ready()


async def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="/no/python: No such file or directory"):
        async with servers_of(tmp_path, python="/no/python") as servers:
            await servers.ready()


async def test_one_that_is_never_ready_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    servers, before = servers_of(tmp_path, ready=1.5, args={"silent": True}), set()

    async def wait() -> None:
        async with servers:
            await until(lambda: len(processes(servers.servers[0])) == 4)
            before.update(processes(servers.servers[0]))
            await servers.ready()

    with pytest.raises(EngineError, match="was not ready after 2 s"):
        await wait()
    assert len(before) == 4
    assert alive(before) == set()


def test_a_host_that_is_not_this_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nobody can listen at '192.0.2.1' here .*correct engine\.servers\.host"):
        servers_of(tmp_path, host="192.0.2.1")


@pytest.mark.parametrize("record", ['{"servers": 7}', '{"servers": [{"url": 7}]}', '{"servers": [{"url": "a:99999"}]}'])
def test_what_a_servers_json_says_that_is_another_s_is_not_needed(tmp_path: Path, record: str) -> None:
    (tmp_path / "servers.json").write_text(record)
    assert len(servers_of(tmp_path, count=2).urls) == 2


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} cannot be had .Address already in use"):
            async with servers_of(tmp_path, port=port) as servers:
                await servers.ready()


async def test_what_dies_too_often_is_given_up_and_with_the_last_one_the_block_ends(tmp_path: Path) -> None:
    said: list[str] = []
    broken = tmp_path / "broken"

    async def work() -> None:
        async with servers_of(tmp_path, said, count=2, max_restarts=2, args={"broken": str(broken)}) as servers:
            await servers.ready()
            broken.touch()
            first, last = servers.servers
            os.kill(main_process(first), signal.SIGKILL)
            await until(lambda: first.condition is Condition.GIVEN_UP)
            assert servers.problems()[first.url].startswith("given up, 0 s: ended with status 1")
            assert last.condition is Condition.READY
            os.kill(main_process(last), signal.SIGKILL)
            await asyncio.sleep(20)

    with pytest.raises(EngineError, match=r"no SGLang server is left; the last: server 1 .*\nthe model is broken"):
        await work()
    assert sum("it is started again in" in text for text in said) == 4


async def test_a_cut_while_they_start_leaves_no_process(tmp_path: Path) -> None:
    servers = servers_of(tmp_path, count=2, args={"silent": True})

    async def wait() -> None:
        async with servers:
            await servers.ready()

    task = asyncio.create_task(wait())
    await until(lambda: all(server.pid and len(processes(server)) == 4 for server in servers.servers))
    every = set().union(*map(processes, servers.servers))
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 1.0
    assert alive(every) == set()


async def test_the_ports_of_a_run_directory_are_the_same_again(tmp_path: Path) -> None:
    first, second = servers_of(tmp_path, count=2), None
    async with first:
        await first.ready()
    second = servers_of(tmp_path, count=3)
    assert second.urls[:2] == first.urls
    assert len(set(second.urls)) == 3


def test_kill_9_of_the_parent_ends_every_process_of_its_servers(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    every = descendants(parent.pid) - {parent.pid}
    assert len(every) >= 2 * 4
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert alive(every) == set()
    assert not list(tmp_path.glob("*.tmp"))


def test_options_are_passed_through_as_the_command_line_has_them() -> None:
    args = {"quantization": "fp8", "enable_x": True, "off": False, "cuda_graph_bs": [1, 2], "override": {"a": 1}}
    line = command(ServersConfig(tp=2, args=args, python="/p"), Path("m"), 30000)
    assert line[:3] == ["/p", "-m", "sglang.launch_server"]
    assert " ".join(line[3:]) == (
        "--model-path m --host 127.0.0.1 --port 30000 --tp-size 2 --dp-size 1 --quantization fp8 --enable-x "
        '--cuda-graph-bs 1 2 --override {"a": 1}'
    )


def pids_of(module: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if module in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found


async def _start(directory: Path) -> None:
    async with servers_of(directory, count=2, args={"litter": True}) as servers:
        await servers.ready()
        print("ready", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(_start(Path(sys.argv[1])))
