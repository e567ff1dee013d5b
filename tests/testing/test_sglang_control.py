"""Pauses, updates, versions, memory and adapters go as on the real server, in the order in which they go there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from gspo_agent.engine.sender import GROUP, Sender
from tests.testing.wire import FREE, TURN, scene, spans


async def test_an_update_in_a_pause_splits_the_versions_exactly_there(weights: str) -> None:
    async with scene() as (server, client):
        server.hold_after = 37
        task = client.start("a")
        await server.sampled(37)
        await client.post("/pause_generation", mode="in_place")
        waiting = client.start("b")
        await server.received("/generate", 2)
        status, reply = await client.post(
            "/update_weights_from_disk", model_path=weights, weight_version="7", flush_cache=False
        )
        assert (status, reply["success"]) == (200, True)
        assert (await client.get("/ready"))[0] == 503
        server.hold_after = None
        await client.post("/continue_generation")
        meta = (await task)[1]["meta_info"]
        assert meta["weight_versions"] == spans(("default", 0, 37), ("7", 37, len(TURN)))
        assert meta["weight_version"] == "7"
        assert (await waiting)[1]["meta_info"]["weight_versions"] == spans(("7", 0, len(TURN)))
        assert (await client.get("/model_info"))[1]["weight_version"] == server.weight_version == "7"


async def test_an_update_that_cannot_flush_fails_and_leaves_two_versions(weights: str) -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        task = client.start("a")
        await server.sampled(20)
        await client.post("/pause_generation", mode="in_place")
        status, reply = await client.post("/update_weights_from_disk", model_path=weights, weight_version="7")
        assert (status, reply["success"]) == (400, False)
        assert "the cache was not flushed" in reply["message"]
        assert (await client.get("/model_info"))[1]["weight_version"] == "default"
        server.hold_after = None
        await client.post("/continue_generation")
        assert (await task)[1]["meta_info"]["weight_versions"] == spans(("default", 0, 20), ("7", 20, len(TURN)))


async def test_what_waits_in_the_queue_is_of_the_version_that_samples_it() -> None:
    async with scene(max_running=1) as (server, client):
        server.hold_after = 20
        first, second = client.start("first"), client.start("second")
        await server.sampled(20)
        await server.received("/generate", 2)
        await client.post("/update_weight_version", new_version="1", abort_all_requests=False)
        server.hold_after = None
        assert (await first)[1]["meta_info"]["weight_versions"] == spans(("default", 0, 20), ("1", 20, len(TURN)))
        assert (await second)[1]["meta_info"]["weight_versions"] == spans(("1", 0, len(TURN)))


async def test_a_retracting_pause_lets_the_cache_be_flushed_and_the_request_goes_on(weights: str) -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        task = client.start("a")
        await server.sampled(20)
        assert (await client.get("/flush_cache"))[0] == 400
        await client.post("/pause_generation", mode="retract")
        assert (await client.get("/flush_cache"))[0] == 200
        assert (await client.post("/update_weights_from_disk", model_path=weights, weight_version="7"))[0] == 200
        server.hold_after = None
        await client.post("/continue_generation")
        reply = (await task)[1]
        assert reply["output_ids"] == TURN
        assert reply["meta_info"]["num_retractions"] == 1
        assert reply["meta_info"]["weight_versions"] == spans(("default", 0, 20), ("7", 20, len(TURN)))


async def test_an_aborting_pause_ends_everything_and_keeps_the_new_out() -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        tasks = [client.start(f"a{n}/") for n in range(3)]
        await server.sampled(20, requests=3)
        assert (await client.post("/pause_generation"))[0] == 200
        assert [(await task)[1]["meta_info"]["finish_reason"] for task in tasks] == [FREE] * 3
        server.hold_after = None
        late = client.start("late")
        await server.received("/generate", 4)
        assert not late.done()
        await client.post("/continue_generation")
        assert (await late)[1]["output_ids"] == TURN


async def test_an_abort_in_a_pause_ends_what_runs_after_it_and_never_what_waits_for_its_end() -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        running = client.start("running")
        await server.sampled(20)
        await client.post("/pause_generation", mode="in_place")
        waiting = client.start("waiting")
        await server.received("/generate", 2)
        for rid in ("running", "waiting"):
            await client.post("/abort_request", rid=rid)
        server.hold_after = None
        assert not running.done()
        await client.post("/continue_generation")
        aborted = (await running)[1]
        # The step under way still samples.
        assert (aborted["output_ids"], aborted["meta_info"]["finish_reason"]) == (TURN[:21], FREE)
        await client.post("/abort_request", rid="waiting")
        assert (await waiting)[1]["output_ids"] == TURN


async def test_an_update_without_a_pause_waits_for_what_runs_and_keeps_the_new_out(weights: str) -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        old = client.start("old")
        await server.sampled(20)
        update = asyncio.create_task(client.post("/update_weights_from_disk", model_path=weights, weight_version="7"))
        await server.received("/update_weights_from_disk")
        new = client.start("new")
        await server.received("/generate", 2)
        assert not update.done()
        server.hold_after = None
        assert (await old)[1]["meta_info"]["weight_versions"] == spans(("default", 0, len(TURN)))
        assert (await update)[0] == 200
        assert (await new)[1]["meta_info"]["weight_versions"] == spans(("7", 0, len(TURN)))


async def test_a_changed_version_aborts_everything_unless_told_not_to() -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        task = client.start("kept")
        await server.sampled(20)
        await client.post("/update_weight_version", new_version="1", abort_all_requests=False)
        await client.post("/update_weight_version", new_version="2")
        reply = (await task)[1]["meta_info"]
        assert (reply["finish_reason"], reply["weight_versions"]) == (FREE, spans(("default", 0, 20)))
        assert reply["weight_version"] == "default"
        assert (await client.get("/model_info"))[1]["weight_version"] == "2"


async def test_weights_without_a_session_or_a_group_are_refused() -> None:
    tensor = torch.tensor([1.5])
    sender = Sender(lambda: [("w", tensor)], torch.device("cpu"))
    sender.hold(7)
    meeting = sender.listen("http://127.0.0.1:1", 2, False, 20.0)
    sender.send(meeting.link, 7, 0, 100)
    body = {
        "names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "weight_version": "7",
        "load_format": "flattened_bucket", "group_name": GROUP,
    }  # fmt: skip
    group = {
        "master_address": meeting.host, "master_port": meeting.port, "rank_offset": 1, "world_size": 3,
        "backend": "gloo", "group_name": GROUP,
    }  # fmt: skip
    handles = {"serialized_named_tensors": sender.handles(7, 0, 100, 2), "weight_version": "8"}
    async with scene(ranks=2) as (server, client):
        statuses = [
            (await client.post(route, **content))[0]
            for route, content in [
                ("/update_weights_from_distributed", body),
                ("/begin_weight_update", {}),
                ("/begin_weight_update", {}),
                ("/update_weights_from_distributed", body),
                ("/init_weights_update_group", group),
                ("/init_weights_update_group", group),
                ("/update_weights_from_distributed", body | {"names": []}),
                ("/update_weights_from_distributed", body),
                ("/update_weights_from_tensor", {"serialized_named_tensors": ["YQ=="]}),
                ("/update_weights_from_tensor", {"serialized_named_tensors": ["YQ==", "?"]}),
                ("/get_weights_by_name", {"name": "w"}),
                ("/get_weights_by_name", {"name": "v"}),
                ("/update_weights_from_tensor", handles),
                ("/end_weight_update", {}),
                ("/end_weight_update", {}),
                ("/destroy_weights_update_group", {"group_name": GROUP}),
                ("/destroy_weights_update_group", {"group_name": GROUP}),
                ("/update_weights_from_disk", {"model_path": "/nowhere"}),
                ("/update_weights_from_disk", {}),
            ]
        ]
        begun, received, handed = [400, 200, 400, 400], [200, 400, 400, 200], [400, 400, 200, 400, 200]
        assert statuses == begun + received + handed + [200, 400, 200, 400, 400, 400]
        assert [float(tensors["w"]) for tensors in server.control.weights.tensors] == [1.5, 1.5]
        assert server.control.loaded == [("w", "7"), ("tensors", "8")]
        assert server.weight_version == "8"


async def test_memory_is_released_when_idle_and_resumed_before_anything_is_computed() -> None:
    async with scene() as (server, client):
        server.hold_after = 20
        task = client.start("a")
        await server.sampled(20)
        await client.post("/pause_generation", mode="in_place")
        statuses = [(await client.post("/release_memory_occupation", tags=["kv_cache"]))[0]]
        await client.post("/pause_generation", mode="retract")
        for route, tags in [
            ("/resume_memory_occupation", ["weights"]),
            ("/release_memory_occupation", ["kv_cache", "weights"]),
            ("/release_memory_occupation", ["weights"]),
            ("/continue_generation", None),
            ("/resume_memory_occupation", ["weights"]),
            ("/continue_generation", None),
            ("/resume_memory_occupation", ["kv_cache"]),
        ]:
            statuses.append((await client.post(route, tags=tags))[0])
            if server.control.backend.released:
                assert (await client.generate("refused"))[0] == 400
        assert statuses == [400, 400, 200, 400, 400, 200, 400, 200]
        server.hold_after = None
        await client.post("/continue_generation")
        assert (await task)[1]["output_ids"] == TURN


async def test_adapters_are_loaded_once_where_the_server_was_started_for_them(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    adapter = {"lora_name": "v1", "lora_path": str(tmp_path)}
    async with scene() as (_, client):
        assert (await client.post("/load_lora_adapter", **adapter))[0] == 400
    async with scene(lora=True) as (_, client):
        calls = [
            ("/load", adapter),
            ("/load", adapter),
            ("/unload", {"lora_name": "v1"}),
            ("/unload", {"lora_name": "v1"}),
        ]
        assert [(await client.post(f"{verb}_lora_adapter", **body))[0] for verb, body in calls] == [200, 400, 200, 400]


async def test_a_request_has_its_adapter_to_the_end_whatever_is_unloaded_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    async with scene(lora=True) as (server, client):
        await client.post("/load_lora_adapter", lora_name="v1", lora_path=str(tmp_path))
        assert (await client.generate("a", lora_path="v2"))[0] == 400
        server.hold_after = 8
        task = client.start("b", lora_path="v1")
        await server.sampled(8)
        unloading = asyncio.create_task(client.post("/unload_lora_adapter", lora_name="v1"))
        await server.received("/unload_lora_adapter")
        assert [model["id"] for model in (await client.get("/v1/models"))[1]["data"]] == ["scripted"]
        assert not unloading.done()
        server.hold_after = None
        assert (await task)[1]["output_ids"] == TURN
        assert (await unloading)[0] == 200
        assert (await client.generate("c", lora_path="v1"))[0] == 200  # it is loaded again
        assert server.adapters.loaded == {"v1": str(tmp_path)}
