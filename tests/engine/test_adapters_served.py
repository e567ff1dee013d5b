"""Adapters that servers get: under a name of their own for each version, verified, and named by every request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.engine.base import Sampled, Sampling, Weights
from gspo_agent.engine.publish import publish
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.errors import ConfigError, EngineError
from gspo_agent.testing.sglang_server import SGLangRouter, SGLangServer
from tests.engine.test_delivery import back
from tests.engine.test_sglang import MARK, WHOLE, ask, engine_of, is_beginning, logprobs, server, tokens, versions

Made = Callable[[int], Weights]
LOAD = "/load_lora_adapter"


@pytest.fixture
def adapter(tmp_path: Path) -> Made:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").touch()

    def made(version: int) -> Weights:
        path = tmp_path / f"step-{version}"
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        return Weights(version, path, lambda: ())

    return made


@asynccontextmanager
async def running(
    tmp_path: Path, number: int = 1, options: dict[str, Any] | None = None, **engine_options: Any
) -> AsyncIterator[tuple[SGLangEngine, list[SGLangServer]]]:
    """Servers that were started with the model."""
    async with AsyncExitStack() as stack:
        given = {"lora": True, "model_path": str(tmp_path / "base"), **(options or {})}
        servers = [await stack.enter_async_context(server(**given)) for _ in range(number)]
        engine = engine_of(*servers, **{"weight_version": None, **engine_options})
        stack.push_async_callback(engine.close)
        await engine.open()
        yield engine, servers


def asked(one: SGLangServer) -> list[str]:
    """The versions of the adapters that episodes named."""
    bodies = [call.body for call in one.requests if call.route == "/generate" and "probe" not in call.body["rid"]]
    return [body["lora_path"].partition("@")[0] for body in bodies]


def loaded(one: SGLangServer) -> list[str]:
    return [name.partition("@")[0] for name in one.adapters.loaded]


async def anything(sampled: Sampled) -> bool:
    return sampled.weight_version == 4


async def test_every_request_names_the_adapter_of_its_version_and_two_stay_loaded(
    tmp_path: Path, adapter: Made
) -> None:
    started = {"model_path": f"{tmp_path}/base/../base"}  # another spelling of the same
    async with running(tmp_path, 2, started) as (engine, servers):
        for version in (1, 2, 3, 4):
            await publish(adapter(version), engine)
            completions = await asyncio.gather(*(ask(engine, f"{version}.{n}-1/") for n in range(4)))
            assert [tokens(completion) for completion in completions] == [WHOLE] * 4
            assert [versions(completion) for completion in completions] == [[version]] * 4
        await engine.compare_each([5, 6, MARK], Sampling(7), anything)
        for one in servers:
            compared = [call.body for call in one.requests if call.route == "/generate"][-1]
            assert compared["lora_path"] == one.weight_version
            assert asked(one) == ["1"] * 2 + ["2"] * 2 + ["3"] * 2 + ["4"] * 2
            assert loaded(one) == ["3", "4"]
            assert one.control.loaded == []  # it has the model already
        assert engine.stats()["versions_from_adapter"] == 16


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_update_ends_what_is_in_flight_with_its_tokens_and_it_goes_on_under_the_next(
    tmp_path: Path, adapter: Made, paused: bool, stream: bool
) -> None:
    async with running(tmp_path, options={"incremental": stream}, stream=stream) as (engine, servers):
        await publish(adapter(1), engine)
        servers[0].hold_after = 40
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(40)
        if paused:
            await engine.pause()
        servers[0].hold_after = None
        await publish(adapter(2), engine)
        await engine.resume()
        completion = await request
        assert is_beginning(completion)
        assert (completion.finish_reason, versions(completion)) == ("abort", [1])
        assert len(tokens(completion)) >= 40
        assert versions(await ask(engine, "next")) == [2]
        assert engine.stats()["discarded"] == 0


async def test_a_request_that_waited_before_the_pause_keeps_its_adapter_and_its_version(
    tmp_path: Path, adapter: Made
) -> None:
    async with running(tmp_path) as (engine, servers):
        await publish(adapter(1), engine)
        late = servers[0].order("stall")
        request = asyncio.create_task(ask(engine))
        await servers[0].received("/generate", 2)
        update = asyncio.create_task(publish(adapter(2), engine))
        await servers[0].received(LOAD, 2)
        late.release()
        await update
        completion = await request
        assert (tokens(completion), versions(completion)) == (WHOLE, [1])
        assert loaded(servers[0]) == ["1", "2"]
        await publish(adapter(3), engine)
        assert loaded(servers[0]) == ["2", "3"]


async def test_a_server_that_restarted_is_given_the_adapter_before_it_is_asked(tmp_path: Path, adapter: Made) -> None:
    async with running(tmp_path) as (engine, servers):
        await publish(adapter(3), engine)
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        await servers[0].restart()
        servers[0].hold_after = None
        completion = await request
        assert (tokens(completion), versions(completion)) == (WHOLE, [3])
        assert loaded(servers[0]) == ["3"]


async def test_a_server_that_lost_an_adapter_by_itself_is_given_it_again(tmp_path: Path, adapter: Made) -> None:
    async with running(tmp_path, look_every=60.0) as (engine, servers):
        await publish(adapter(3), engine)
        servers[0].adapters.loaded.clear()
        servers[0].adapters._known.clear()
        completion = await ask(engine)
        assert (tokens(completion), versions(completion)) == (WHOLE, [3])
        assert engine.stats()["retries"] == 1
        servers[0].order("status", status=400, message="too silly")
        with pytest.raises(EngineError, match="too silly"):  # what it refuses for another reason, it refuses
            await ask(engine, "s")


@pytest.mark.parametrize("fault", ["status", "unchanged"])
async def test_who_does_not_take_the_adapter_is_out_until_it_does(tmp_path: Path, adapter: Made, fault: Any) -> None:
    async with running(tmp_path, 2, look_every=60.0) as (engine, servers):
        await publish(adapter(1), engine)
        for one in servers:
            one.hold_after = 8
        requests = [asyncio.create_task(ask(engine, f"{n}-1/")) for n in range(4)]
        for one in servers:
            await one.sampled(8, requests=2)
        for one in servers:
            one.hold_after = None
        servers[0].order(fault, route=LOAD, status=400)
        await publish(adapter(2), engine)
        assert [worker.url for worker in engine.fleet.serving] == [servers[1].url]
        completions = await asyncio.gather(*requests)
        assert all(is_beginning(completion) for completion in completions)
        assert versions(await ask(engine, "next")) == [2]
        engine.fleet.check(engine.fleet.workers[0])
        await back(engine, 2)
        assert loaded(servers[0]) == ["1", "2"]


async def test_a_server_with_other_weights_is_given_the_model_first(tmp_path: Path, adapter: Made) -> None:
    async with running(tmp_path, 2) as (engine, servers):
        other = engine_of(servers[0], weight_version=None)
        await other.open()
        (tmp_path / "whole").mkdir()
        (tmp_path / "whole" / "model.safetensors").touch()
        await publish(Weights(7, tmp_path / "whole", lambda: ()), other)
        await other.close()
        await publish(adapter(1), engine)
        await publish(adapter(2), engine)
        assert [Path(path).name for path, _ in servers[0].control.loaded] == ["whole", "base"]
        assert servers[1].control.loaded == []
        assert versions(await ask(engine)) == [2]


async def test_what_a_dead_process_left_loaded_is_unloaded(tmp_path: Path, adapter: Made) -> None:
    async with running(tmp_path) as (engine, servers):
        servers[0].adapters.loaded["by hand"] = "/x"
        await publish(adapter(1), engine)
        await publish(adapter(2), engine)
        await engine.close()
        after = engine_of(servers[0], weight_version=None)
        await after.open()
        for version in (3, 4):
            await publish(adapter(version), after)
        assert loaded(servers[0]) == ["by hand", "3", "4"]
        assert [Path(path).name for path, _ in servers[0].control.loaded] == ["base"]  # nobody knows whose it was
        assert logprobs(await ask(after))
        await after.close()


async def test_behind_a_router_every_server_has_the_adapter_that_a_request_names(tmp_path: Path, adapter: Made) -> None:
    options = {"lora": True, "model_path": str(tmp_path / "base")}
    async with server(**options) as one, server(**options) as other, SGLangRouter([one.url, other.url]) as router:
        engine = SGLangEngine([router.url], vocab_size=264, look_every=0.02, back_off=0.01, patience=10.0)
        await engine.open()
        try:
            await publish(adapter(1), engine)
            slow = other.order("stall", route=LOAD)
            update = asyncio.create_task(publish(adapter(2), engine))
            await other.received(LOAD, 2)
            while not one.weight_version.startswith("2"):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            requests = [asyncio.create_task(ask(engine, f"e{n}-2/")) for n in range(8)]
            await asyncio.sleep(0.05)
            slow.release()
            await update
            completions = await asyncio.gather(*requests)
            assert [tokens(completion) for completion in completions] == [WHOLE] * 8
            assert {version for completion in completions for version in versions(completion)} == {2}
            assert asked(one)
            assert asked(other)
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lora": False}, "was started without --enable-lora"), ({}, "has data-parallel replicas")],
)
async def test_a_server_that_takes_no_adapters_is_named_with_the_remedy(
    tmp_path: Path, adapter: Made, options: dict[str, Any], message: str
) -> None:
    async with running(tmp_path, options=options) as (engine, _):
        engine.fleet.workers[0].replicas = 1 if options else 2
        with pytest.raises(ConfigError, match=f"{message}, and takes no adapters; start it with --enable-lora"):
            await publish(adapter(1), engine)
