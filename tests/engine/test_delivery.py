"""Weights that reach servers without a file between: whole, at all of them, whatever dies in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_agent.engine.base import Weights
from gspo_agent.engine.delivery import Transport
from gspo_agent.engine.publish import publish
from gspo_agent.engine.sender import Sender
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.engine.worker import State
from gspo_agent.errors import ConfigError, EngineError
from gspo_agent.testing.sglang_server import SGLangServer
from tests.engine.test_sglang import WHOLE, ask, engine_of, server, tokens, versions
from tests.testing.wire import weights_name

KINDS = ["distributed", "tensor"]
UPDATE = {"distributed": "/update_weights_from_distributed", "tensor": "/update_weights_from_tensor"}


class Owner:
    """Has weights that say of which version they are."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self.sender = Sender(lambda: self.named.items(), torch.device("cpu"))

    def step(self, version: int) -> Weights:
        self.sender.forget()
        embedding = torch.full((8, 4), float(version))
        self.named = {
            "embed.weight": embedding,
            "layer.weight": torch.full((4, 4), version + 0.25),
            "layer.scale": torch.tensor(version + 0.5, dtype=torch.float64),
            "bias": torch.full((3,), version + 0.75, dtype=torch.bfloat16),
            "head.weight": embedding,
        }
        self.sender.hold(version)
        return Weights(version, None, lambda: self.named.items(), self.send)

    def send(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.sender, *arguments)

    def assert_held(self, *servers: SGLangServer) -> None:
        """Every rank has every value, and tied ones under one name."""
        for one in servers:
            for tensors in one.control.weights.tensors:
                assert set(tensors) == self.named.keys() - {"head.weight"}
                assert all(torch.equal(tensor, self.named[name]) for name, tensor in tensors.items())


@asynccontextmanager
async def running(
    number: int, kind: Any, options: dict[str, Any] | None = None, **engine_options: Any
) -> AsyncIterator[tuple[SGLangEngine, list[SGLangServer], Owner]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server(**(options or {}))) for _ in range(number)]
        transport = Transport(kind, 100, engine_options.pop("seconds", 20.0))
        engine = engine_of(*servers, **{"weight_version": None, "transport": transport, **engine_options})
        stack.push_async_callback(engine.close)
        await engine.open()
        yield engine, servers, Owner()


def changes(one: SGLangServer) -> list[str]:
    """What was asked of it about weights."""
    return [call.route for call in one.requests if "weight" in call.route and "info" not in call.route]


async def back(engine: SGLangEngine, number: int) -> None:
    async with asyncio.timeout(20):
        while sum(worker.state is State.SERVING for worker in engine.fleet.workers) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_rank_of_every_server_holds_every_value_and_no_request_is_aborted(kind: str) -> None:
    async with running(2, kind, {"ranks": 2}) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        owner.assert_held(*servers)
        for one in servers:
            one.requests.clear()
            one.hold_after = 40
        requests = [asyncio.create_task(ask(engine, f"{n}-1/")) for n in range(4)]
        for one in servers:
            await one.sampled(40, requests=2)
        await publish(owner.step(2), engine)
        owner.assert_held(*servers)
        for one in servers:
            one.hold_after = None
        completions = await asyncio.gather(*requests)
        assert [tokens(completion) for completion in completions] == [WHOLE] * 4
        assert [versions(completion) for completion in completions] == [[1, 2]] * 4
        for one in servers:
            assert changes(one) == [
                "/update_weight_version", "/begin_weight_update", *[UPDATE[kind]] * 4, "/end_weight_update",
                "/update_weight_version",
            ]  # fmt: skip
            sent = [dict(call.body) for call in one.requests if call.route.startswith("/update_weight")]
            assert {body["abort_all_requests"] for body in sent} == {False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_the_cache_is_flushed_once_with_the_last_bucket(kind: str, mode: str) -> None:
    async with running(1, kind, pause_mode=mode) as (engine, servers, owner):
        servers[0].hold_after = 40
        await publish(owner.step(1), engine)
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(40)
        servers[0].requests.clear()
        await publish(owner.step(2), engine)
        servers[0].hold_after = None
        found = tokens(await request)
        assert found == WHOLE[: 200 if mode == "retract" else 40]
        flushed = [call.body["flush_cache"] for call in servers[0].requests if call.route == UPDATE[kind]]
        assert flushed == [False, False, False, True]


FAULTS = {
    "dies": {"kind": "crash"},
    "hangs": {"kind": "stall"},
    "breaks": {"kind": "status", "status": 500},
    "refuses": {"kind": "status", "status": 400, "times": 2},
    "cuts": {"kind": "cut"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_who_fails_in_the_middle_is_out_until_it_has_all_of_it_and_the_others_go_on(
    kind: str, fault: str
) -> None:
    async with running(3, kind, seconds=0.5) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        servers[1].order(route=UPDATE[kind], skip=1, **FAULTS[fault])
        await publish(owner.step(2), engine)
        owner.assert_held(servers[0], servers[2])
        completions = await asyncio.gather(*(ask(engine, f"{n}-1/") for n in range(4)))
        assert {version for completion in completions for version in versions(completion)} == {2}
        if fault == "dies":
            await servers[1].restart()
        await back(engine, 3)
        owner.assert_held(*servers)
        assert [weights_name(one) for one in servers] == ["2", "2", "2"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_only_server_may_have_restarted_unseen_between_two_updates(kind: str) -> None:
    async with running(1, kind, look_every=100.0) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        await servers[0].restart()
        await publish(owner.step(2), engine)
        owner.assert_held(*servers)


@pytest.mark.parametrize("kind", KINDS)
async def test_all_servers_may_restart_between_updates_as_long_as_the_weights_are_there(kind: str) -> None:
    async with running(2, kind) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        for one in servers:
            await one.restart()
        assert tokens(await ask(engine)) == WHOLE
        await back(engine, 2)
        owner.assert_held(*servers)


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_that_change_meanwhile_are_not_given_and_the_next_are(kind: str) -> None:
    async with running(2, kind) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        owner.sender.forget()  # a step has begun
        await servers[0].restart()
        while "are not here any more" not in engine.fleet.workers[0].problem:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert servers[0].weight_version == "default"
        assert versions(await ask(engine)) == [1]
        await publish(owner.step(2), engine)
        assert engine.fleet.workers[0].state is State.SERVING
        owner.assert_held(*servers)


async def test_what_was_left_in_the_middle_says_so_and_is_taken_up() -> None:
    async with running(1, "tensor", look_every=100.0) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        servers[0].order("status", route=UPDATE["tensor"], status=400, skip=2)
        with pytest.raises(EngineError, match="no server took weights 2"):
            await publish(owner.step(2), engine)
        assert weights_name(servers[0]) == "2 unfinished"
        await publish(owner.step(3), engine)
        owner.assert_held(*servers)


async def test_a_server_that_is_none_for_transfers_is_named_with_the_remedy() -> None:
    async with running(1, "distributed") as (engine, _, owner):
        engine.fleet.workers[0].replicas = 2
        with pytest.raises(ConfigError, match=r'replicas or pipeline stages.*write engine.weights = "disk"'):
            await publish(owner.step(1), engine)
        with pytest.raises(EngineError, match=r"weights 2 have nobody who could send them: give Weights.source"):
            await publish(Weights(2, None, lambda: ()), engine)


# ---- one machine's GPUs for both


def memory(one: SGLangServer) -> list[Any]:
    """What was asked of it, in order, with the parts of its memory that are meant."""
    routes = (
        "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/begin_weight_update",
        "/update_weights_from_disk", "/end_weight_update", "/continue_generation",
    )  # fmt: skip
    return [
        (call.route.split("_")[0], *(call.body.get("tags") or [call.body.get("mode")]))
        for call in one.requests
        if call.route in routes
    ]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_memory_is_released_while_the_learner_works_and_episodes_go_on_behind_it(mode: str) -> None:
    async with running(2, "tensor", {"ranks": 2}, pause_mode=mode) as (engine, servers, owner):
        await publish(owner.step(1), engine)
        for one in servers:
            one.hold_after = 40
            one.requests.clear()
        requests = [asyncio.create_task(ask(engine, f"{n}-1/")) for n in range(4)]
        for one in servers:
            await one.sampled(40, requests=2)
        await engine.pause()
        await engine.release()
        assert [weights_name(one) for one in servers] == ["none released weights kv_cache"] * 2
        await asyncio.sleep(0.1)  # whoever looks at them meanwhile leaves them alone
        await publish(owner.step(2), engine)
        await engine.resume()
        for one in servers:
            one.hold_after = None
        completions = await asyncio.gather(*requests)
        owner.assert_held(*servers)
        assert [one.control.backend.released for one in servers] == [set(), set()]
        for completion in completions:
            assert tokens(completion) == WHOLE
            assert set(versions(completion)) <= {1, 2}
        assert memory(servers[0])[:2] == [("/pause", "in_place"), ("/pause", "retract")]
        after = memory(servers[0])[2:]
        assert [call for call in after if call[0] not in ("/pause", "/continue")] == [
            ("/release", "weights", "kv_cache"), ("/resume", "weights"), ("/begin", None), ("/end", None),
            ("/resume", "kv_cache"),
        ]  # fmt: skip
        assert after[-1][0] == "/continue"


async def test_a_server_that_a_dead_process_left_without_memory_is_brought_back() -> None:
    async with running(1, "tensor") as (engine, servers, owner):
        await publish(owner.step(1), engine)
        await engine.pause()
        await engine.release()
        await engine.close()
        next_life = engine_of(servers[0], weight_version=None, transport=Transport("tensor", 100, 20.0))
        await next_life.open()
        await publish(owner.step(2), next_life)
        owner.assert_held(*servers)
        assert tokens(await ask(next_life)) == WHOLE
        await next_life.close()


async def test_who_restarts_while_memory_is_released_is_asked_to_resume_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    async with running(2, "disk") as (engine, servers, _):
        await publish(Weights(1, tmp_path, lambda: ()), engine)
        await engine.pause()
        await engine.release()
        await servers[0].restart()
        await publish(Weights(2, tmp_path, lambda: ()), engine)
        await engine.resume()
        await back(engine, 2)
        assert [weights_name(one) for one in servers] == ["2", "2"]
        assert "/resume_memory_occupation" not in {call.route for call in servers[0].requests[-20:]}
        assert servers[1].control.backend.released == set()
        assert tokens(await ask(engine)) == WHOLE


async def test_a_server_that_releases_nothing_is_named_with_the_remedy() -> None:
    async with running(1, "tensor") as (engine, _, owner):
        await publish(owner.step(1), engine)
        engine.fleet.workers[0].saves_memory = False
        await engine.pause()
        with pytest.raises(ConfigError, match="start it with --enable-memory-saver"):
            await engine.release()
