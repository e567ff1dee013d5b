"""What changes while weights are brought to servers: who is there, who fails, who comes back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.engine import fleet
from gspo_agent.engine.base import Sampled, Sampling, Weights
from gspo_agent.engine.delivery import Transport
from gspo_agent.engine.publish import publish
from gspo_agent.engine.sender import Sender
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.engine.worker import State
from gspo_agent.testing.sglang_server import SGLangServer
from tests.engine.test_delivery import KINDS, UPDATE, Owner, back
from tests.engine.test_delivery import running as transferring
from tests.engine.test_sglang import (  # noqa: F401 (weights is a fixture)
    MARK,
    WHOLE,
    ask,
    engine_of,
    routed,
    running,
    server,
    tokens,
    versions,
    weights,
)
from tests.testing.wire import weights_name

Made = Callable[[int], Weights]
DISK = "/update_weights_from_disk"
FIRST = "its log-probabilities are compared with the learner's first, under the next weights"


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


# ---- a router's list


async def test_who_leaves_a_router_during_an_update_is_not_put_back_and_who_joins_gets_the_weights(
    weights: Made,  # noqa: F811
) -> None:
    async with routed() as (engine, router, servers), server() as joined:
        await publish(weights(3), engine)
        slow = servers[0].order("stall", route=DISK)
        update = asyncio.create_task(publish(weights(4), engine))
        await servers[0].received(DISK, 2)
        (left,) = [id for id, url in router.workers.items() if url == servers[0].url]
        del router.workers[left]
        router.workers["new"] = joined.url
        slow.release()
        await update
        now = {servers[1].url, joined.url}
        await until(lambda: {worker.url for worker in engine.fleet.workers} == now)
        await back(engine, 2)
        assert set(router.workers.values()) == now
        assert weights_name(joined) == "4"
        completions = await asyncio.gather(*(ask(engine, f"e{n}-2/") for n in range(8)))
        assert {version for completion in completions for version in versions(completion)} == {4}


async def test_who_was_withdrawn_from_a_router_for_a_failed_update_is_put_back(weights: Made) -> None:  # noqa: F811
    async with routed() as (engine, router, servers):
        fault = servers[0].order("status", route=DISK, status=400, times=None)
        await publish(weights(3), engine)
        assert set(router.workers.values()) == {servers[1].url}
        servers[0].faults.remove(fault)
        await until(lambda: len(router.workers) == 2)
        await back(engine, 2)
        assert weights_name(servers[0]) == "3"


# ---- a server that is killed, hangs or lies


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_kill_9_of_a_server_between_two_buckets_leaves_the_others_at_the_new_weights(kind: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gspo_agent.testing.sglang_server", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode()
        async with server() as one:
            owner = Owner()
            engine = SGLangEngine(
                [one.url, url.strip()], vocab_size=264, look_every=0.05, transport=Transport(kind, 100, 20.0)
            )
            await engine.open()
            try:
                await publish(owner.step(1), engine)
                calls = 0

                def send(function: Callable[..., Any], *arguments: Any) -> Any:
                    nonlocal calls
                    calls += function in (Sender.send, Sender.handles)
                    if calls == 5:  # of two servers with four buckets each
                        process.kill()
                    return owner.send(function, *arguments)

                second = owner.step(2)
                await publish(Weights(2, None, second.tensors, send), engine)
                owner.assert_held(one)
                assert [worker.url for worker in engine.fleet.serving] == [one.url]
                assert versions(await ask(engine)) == [2]
            finally:
                await engine.close()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_takes_every_part_and_keeps_its_name_is_out(kind: str) -> None:
    async with transferring(2, kind, look_every=60.0) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        for last_word in (1, 3) if kind == "distributed" else (1,):  # a group that it was in is tried twice
            servers[0].order("unchanged", route="/update_weight_version", skip=last_word)
        await publish(owner.step(2), engine)
        assert [worker.url for worker in engine.fleet.serving] == [servers[1].url]
        assert "reports weights" in engine.problems()[servers[0].url]
        assert versions(await ask(engine)) == [2]
        engine.fleet.check(engine.fleet.workers[0])
        await back(engine, 2)
        owner.assert_held(*servers)


async def test_an_update_does_not_wait_for_a_server_that_hangs_and_gets_no_requests(
    weights: Made,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "_GRACE_SECONDS", 0.1)
    async with running(2) as (engine, servers):
        servers[0].order("status", route=DISK, status=500)
        hangs = servers[0].order("stall", route=DISK, skip=1)
        await publish(weights(3), engine)
        await servers[0].received(DISK, 2)  # it is being brought back, and hangs in that
        async with asyncio.timeout(5):
            await publish(weights(4), engine)
        assert [worker.url for worker in engine.fleet.serving] == [servers[1].url]
        assert versions(await ask(engine)) == [4]
        hangs.release()
        await back(engine, 2)
        assert [weights_name(one) for one in servers] == ["4", "4"]


# ---- an update beside something else


@pytest.mark.parametrize("kind", KINDS)
async def test_an_update_meets_a_server_that_is_just_coming_back(kind: str) -> None:
    """With the weights before: it gets the next ones instead, and no request between."""
    async with transferring(2, kind) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        servers[0].order("status", route=UPDATE[kind], status=500)
        slow = servers[0].order("stall", route=UPDATE[kind], skip=1)
        await publish(owner.step(2), engine)
        async with asyncio.timeout(20):
            await servers[0].received(UPDATE[kind], 4 + 2)  # it is at the first part of weights 2
        assert engine.fleet.workers[0].state is State.OUT
        update = asyncio.create_task(publish(owner.step(3), engine))
        await asyncio.sleep(0.02)
        slow.release()
        await update
        await back(engine, 2)
        owner.assert_held(*servers)
        completions = await asyncio.gather(*(ask(engine, f"{n}-1/") for n in range(4)))
        assert {version for completion in completions for version in versions(completion)} == {3}


async def test_who_comes_back_with_weights_that_are_older_by_then_gets_no_request_for_them(
    weights: Made,  # noqa: F811
) -> None:
    async with running(2) as (engine, servers):
        servers[0].order("status", route=DISK, status=500)
        older, newer = [servers[0].order("stall", route=DISK, skip=skip) for skip in (1, 2)]
        await publish(weights(3), engine)
        await servers[0].received(DISK, 2)
        update = asyncio.create_task(publish(weights(4), engine))
        await servers[1].received(DISK, 2)
        older.release()
        await servers[0].received(DISK, 3)
        assert engine.fleet.workers[0].state is State.OUT
        newer.release()
        await update
        await back(engine, 2)
        assert weights_name(servers[0]) == "4"


async def test_a_server_that_joins_during_an_update_gets_those_weights_and_no_request_before(
    weights: Made,  # noqa: F811
) -> None:
    async with running(1) as (engine, servers), server() as joined:
        await publish(weights(3), engine)
        slow = servers[0].order("stall", route=DISK)
        update = asyncio.create_task(publish(weights(4), engine))
        await servers[0].received(DISK, 2)
        await engine.add(joined.url)
        await until(lambda: len(engine.fleet.serving) == 2)
        assert weights_name(joined) == "4"
        slow.release()
        await update
        completions = await asyncio.gather(*(ask(engine, f"{n}-1/") for n in range(4)))
        assert {version for completion in completions for version in versions(completion)} == {4}
        assert [Path(path).name for path, _ in joined.control.loaded] == ["step-4"]


# ---- a server that was away


async def returned(one: SGLangServer, engine: SGLangEngine) -> None:
    """It was away for so long that it is looked at as a new one."""
    await one.stop()
    await until(lambda: not engine.fleet.workers[0].sglang)
    await one.restart()


@pytest.mark.parametrize("paused", [False, True])
async def test_a_server_that_was_away_is_compared_again_before_it_gets_requests(
    weights: Made,  # noqa: F811
    paused: bool,
) -> None:
    seen: list[Sampled] = []
    able = asyncio.Event()

    async def compare(sampled: Sampled) -> bool:
        seen.append(sampled)
        return able.is_set()

    async with running(2, max_misses=1) as (engine, servers):
        await publish(weights(3), engine)
        able.set()
        await engine.compare_each([5, 6, MARK], Sampling(7, 0.5), compare)
        assert [sampled.server for sampled in seen] == [one.url for one in servers]
        able.clear()
        await returned(servers[0], engine)
        await until(lambda: len(seen) == 3)
        assert (seen[2].server, seen[2].weight_version, len(seen[2].token_ids)) == (servers[0].url, 3, 7)
        await asyncio.sleep(0.05)
        assert engine.problems() == {servers[0].url: FIRST}
        assert len(seen) == 3
        if paused:
            await engine.pause()
        able.set()
        await publish(weights(4), engine)
        await back(engine, 2)
        assert len(seen) == 4
        assert seen[-1].weight_version == 4
        assert servers[0].scheduler.paused is paused
        await engine.resume()
        assert tokens(await ask(engine)) == WHOLE
        await publish(weights(5), engine)
        assert len(seen) == 4  # once is enough
