"""The fault-injecting server says nothing that the real one does not say, and refuses with the same status."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from gspo_agent.testing.sglang_server import SGLangServer
from tests.engine.test_endpoints import table
from tests.sglang.asking import ON_REAL_SERVERS, VOCAB
from tests.sglang.real import RealServer

pytestmark = ON_REAL_SERVERS
Answer = tuple[int, Any]
OPTIONS = {"context_length"}
"""What /server_info says of an option that only ours was started with."""
ASKED: dict[str, Any] = {
    "rid": "likeness~1~",
    "input_ids": [1, 2, 3, 4, 5],
    "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True, "stream_interval": 16},
    "return_logprob": True,
}
LONG = {**ASKED, "sampling_params": {**ASKED["sampling_params"], "max_new_tokens": 3000}}
NEGATIVE = {**ASKED, "sampling_params": {"max_new_tokens": -1}}
CALLS: dict[str, tuple[str, Any]] = {
    "what it runs": ("GET /server_info", None),
    "what it runs, by the older name": ("GET /get_server_info", None),
    "what it serves": ("GET /model_info", None),
    "what it serves, by the older name": ("GET /get_model_info", None),
    "health": ("GET /health_generate", None),
    "no route": ("GET /workers", None),
    "another method": ("GET /update_weights_from_disk", None),
    "a request": ("POST /generate", ASKED),
    "a request without logprobs": ("POST /generate", {**ASKED, "return_logprob": False}),
    "a stream": ("POST /generate", {**ASKED, "stream": True}),
    "no JSON": ("POST /generate", b"{no"),
    "no prompt": ("POST /generate", {**ASKED, "input_ids": []}),
    "a prompt that is too long": ("POST /generate", {**ASKED, "input_ids": [1] * 5000}),
    "a prompt that is too long, streamed": ("POST /generate", {**ASKED, "input_ids": [1] * 5000, "stream": True}),
    "a prompt that leaves too little room": ("POST /generate", {**LONG, "input_ids": [1] * 4000}),
    "a negative length": ("POST /generate", NEGATIVE),
    "an abort of nobody": ("POST /abort_request", {"rid": "nobody", "abort_all": False}),
    "a pause": ("POST /pause_generation", {"mode": "in_place"}),
    "its end": ("POST /continue_generation", {}),
    "another pause": ("POST /pause_generation", {"mode": "retract"}),
    "its end too": ("POST /continue_generation", {}),
    "a pause of no known kind": ("POST /pause_generation", {"mode": "sometimes"}),
    "weights that are not there": ("POST /update_weights_from_disk", {"model_path": "DIRECTORY/none"}),
    "weights of no name": ("POST /update_weights_from_disk", {}),
    "weights": (
        "POST /update_weights_from_disk",
        {"model_path": "DIRECTORY/step-0", "weight_version": "7", "abort_all_requests": False, "flush_cache": True},
    ),
    "an update without a beginning": ("POST /end_weight_update", {}),
    "tensors without a beginning": (
        "POST /update_weights_from_tensor",
        {"serialized_named_tensors": ["AAAA"], "flush_cache": False},
    ),
    "a broadcast without a beginning": (
        "POST /update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none", "flush_cache": False},
    ),
    "the beginning of an update": ("POST /begin_weight_update", {}),
    "a second beginning": ("POST /begin_weight_update", {}),
    "the end of an update": ("POST /end_weight_update", {}),
    "a group of nobody": ("POST /init_weights_update_group", {"world_size": 2}),
    "the end of no group": ("POST /destroy_weights_update_group", {"group_name": "none"}),
    "an adapter that is not wanted": ("POST /load_lora_adapter", {"lora_name": "a", "lora_path": "DIRECTORY/none"}),
}


async def call(session: aiohttp.ClientSession, url: str, line: str, body: Any, directory: Path) -> Answer:
    """Status and content; of a stream the list of its events."""
    method, path = line.split()
    data = (
        None
        if body is None
        else body
        if isinstance(body, bytes)
        else orjson.dumps(body).replace(b"DIRECTORY", str(directory).encode())
    )
    headers = {"Content-Type": "application/json"}
    async with session.request(method, url + path, data=data, headers=headers) as answer:
        raw = await answer.read()
    if answer.content_type == "text/event-stream":
        events = [event.removeprefix(b"data: ") for event in raw.strip().split(b"\n\n")]
        return answer.status, [event.decode() if event == b"[DONE]" else orjson.loads(event) for event in events]
    return answer.status, orjson.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()


def foreign(ours: Any, theirs: Any, place: str) -> list[str]:
    """Where ours says what theirs does not."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        missing = [f"{place}.{key} is not there" for key in ours.keys() - theirs.keys()]
        both = ours.keys() & theirs.keys() - OPTIONS
        return missing + [line for key in sorted(both) for line in foreign(ours[key], theirs[key], f"{place}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list):
        if not ours or not theirs:
            return []
        ends = (0, -1) if place.endswith("stream") else (0,)
        return [line for end in ends for line in foreign(ours[end], theirs[end], f"{place}[{end}]")]
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return []
    return [] if type(ours) is type(theirs) else [f"{place} is {ours!r:.80}, not {theirs!r:.80}"]


def has(answer: Any, field: str) -> bool:
    """Whether a field that the engine reads is there: "meta_info.id"."""
    first, _, rest = field.partition(".")
    return first in answer and (not rest or has(answer[first], rest))


async def aborted(session: aiohttp.ClientSession, url: str, directory: Path, stream: bool) -> tuple[Answer, Answer]:
    """A request that is aborted in its course, and one of the same name beside it."""
    rid = f"likeness {stream}~1~"  # an abort that is late would meet the next request of its name
    request = {**LONG, "rid": rid, "stream": stream}
    asked = asyncio.create_task(call(session, url, "POST /generate", request, directory))
    await asyncio.sleep(0.3)
    again = await call(session, url, "POST /generate", {**ASKED, "rid": rid}, directory)
    while not asked.done():
        await call(session, url, "POST /abort_request", {"rid": rid, "abort_all": False}, directory)
        await asyncio.sleep(0.05)
    return await asked, again


async def test_the_fault_injecting_server_is_like_the_real_one(servers: list[RealServer], directory: Path) -> None:
    differences: list[str] = []
    options: dict[str, Any] = {"vocab_size": VOCAB, "context_tokens": 4096, "incremental": True}
    async with SGLangServer(None, delay=0.01, **options) as ours, aiohttp.ClientSession() as session:
        for name, (line, body) in CALLS.items():
            mine = await call(session, ours.url, line, body, directory)
            real = await call(session, servers[0].url, line, body, directory)
            if mine[0] != real[0]:
                differences.append(f"{name}: {line}: status {mine[0]} {mine[1]!r:.200}, not {real[0]} {real[1]!r:.200}")
            elif name in ("a request", "weights") or (line.startswith("GET") and real[0] == 200):
                differences += foreign(mine[1], real[1], name)
                differences += [
                    f"{name}: no {field}" for field in table().get(line, ((), ()))[1] if not has(real[1], field)
                ]
            elif name.startswith("a stream"):
                differences += foreign(mine[1], real[1], "a stream")
            else:
                differences += foreign(mine[1], real[1], name)
        for stream in (False, True):
            mine, twin = await aborted(session, ours.url, directory, stream)
            real, real_twin = await aborted(session, servers[0].url, directory, stream)
            last, real_last = (mine[1][-2], real[1][-2]) if stream else (mine[1], real[1])
            differences += foreign(last, real_last, f"aborted, {stream=}")
            differences += foreign(twin, real_twin, "its twin")
            if last["meta_info"]["finish_reason"] != real_last["meta_info"]["finish_reason"]:
                differences.append(
                    f"{last['meta_info']['finish_reason']}, not {real_last['meta_info']['finish_reason']}"
                )
            if (mine[0], twin[0]) != (real[0], real_twin[0]):
                differences.append(f"aborted: {mine[0]}, {twin[0]}, not {real[0]}, {real_twin[0]} {real_twin[1]}")
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"a": 1}, {}), ({"a": {"b": None}}, {"a": {"b": 1}}), ([{"a": 1}], [{"a": "1"}]), ("x", b"x")],
)
def test_what_is_foreign_is_found(ours: Any, theirs: Any) -> None:
    assert len(foreign(ours, theirs, "x")) == 1
    assert foreign(theirs, theirs, "x") == []
