from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_agent.engine.base import Completion, Engine, Sampled, Sampling, Weights
from gspo_agent.engine.delivery import Transport
from gspo_agent.engine.publish import publish
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.errors import ConfigError, EngineError
from gspo_agent.testing.scripted import scripted_logprob
from gspo_agent.testing.sglang_server import WRONG, SGLangRouter, SGLangServer
from tests.testing.wire import weights_name

MARK, STOP = 258, 257


def counted(prompt: Any, seed: int) -> list[int]:
    """A turn of 200 tokens that say where they are."""
    return [n % 200 for n in range(199)] + [STOP]


def server(**options: Any) -> SGLangServer:
    return SGLangServer(counted, **{"chunk": 4, "delay": 0.001, **options})


def engine_of(*servers: SGLangServer, **options: Any) -> SGLangEngine:
    quick: dict[str, Any] = {"look_every": 0.02, "back_off": 0.001, "patience": 10.0, "weight_version": 0}
    return SGLangEngine([one.url for one in servers], vocab_size=264, **{**quick, **options})


@asynccontextmanager
async def running(
    number: int = 1, options: dict[str, Any] | None = None, **engine_options: Any
) -> AsyncIterator[tuple[SGLangEngine, list[SGLangServer]]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server(**(options or {}))) for _ in range(number)]
        engine = engine_of(*servers, **engine_options)
        stack.push_async_callback(engine.close)
        await engine.open()
        for one in servers:
            one.requests.clear()
        yield engine, servers


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[int], Weights]:
    def made(version: int) -> Weights:
        path = tmp_path / f"step-{version}"
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(b"")
        return Weights(version, path, lambda: ())

    return made


async def test_every_server_is_asked_for_the_comparison_and_incomplete_logprobs_are_refused() -> None:
    async with running(3) as (engine, servers):
        servers[2].crash()
        found: list[Sampled] = []

        async def compare(sampled: Sampled) -> bool:
            found.append(sampled)
            return True

        await engine.compare_each([5, 6, MARK], Sampling(7, 0.5), compare)
        assert [(one.server, one.weight_version) for one in found] == [(servers[0].url, 0), (servers[1].url, 0)]
        assert [one.token_ids for one in found] == [list(range(7))] * 2
        assert found[0].logprobs == [scripted_logprob(0, 3 + n, n) for n in range(7)]
        servers[1].order("reply", change=WRONG["first logprob only"])
        with pytest.raises(ConfigError, match=f"{servers[1].url}: 7 output ids but 1 output logprobs"):
            await engine.compare_each([5, 6, MARK], Sampling(7, 0.5), compare)


async def ask(engine: Engine, id: str = "r", count: int = 300, seed: int = 7, stop: int = STOP) -> Completion:
    return await engine.generate([5, 6, MARK], Sampling(count, 1.0, (stop,), seed), request_id=id)


def tokens(completion: Completion) -> list[int]:
    return [int(token) for segment in completion.segments for token in segment.token_ids]


def logprobs(completion: Completion) -> list[float]:
    return [float(value) for segment in completion.segments for value in segment.logprobs]  # type: ignore[union-attr]


def versions(completion: Completion) -> list[int | None]:
    return [segment.weight_version for segment in completion.segments]


def routes(one: SGLangServer) -> list[str]:
    return [call.route for call in one.requests if not call.route.endswith("_info")]


def rids(one: SGLangServer) -> list[str]:
    return [call.body["rid"] for call in one.requests if call.route == "/generate"]


WHOLE = counted((), 0)
LOGPROBS = np.float32([scripted_logprob(7, 3 + n, token) for n, token in enumerate(WHOLE)]).tolist()


def is_beginning(completion: Completion) -> bool:
    """Whether it has the first of the tokens and their logprobs, all of them where it was not cut."""
    found = tokens(completion)
    return found == WHOLE[: len(found)] and logprobs(completion) == LOGPROBS[: len(found)]


# ---- one request


async def test_token_ids_go_in_and_come_out_with_their_logprobs_and_version() -> None:
    async with running() as (engine, servers):
        completion = await ask(engine)
        assert (tokens(completion), logprobs(completion)) == (WHOLE, LOGPROBS)
        assert (completion.finish_reason, versions(completion)) == ("stop", [0])
        assert {segment.author for segment in completion.segments} == {"policy"}
        stats = engine.stats()
        assert (stats["tokens"], stats["prefill_tokens"], stats["versions_from_spans"]) == (200, 3, 1)
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert routes(servers[0]) == ["/generate"]


async def test_what_is_sent_keeps_the_logprob_that_of_the_sampling_probability() -> None:
    async with running() as (engine, servers):
        await engine.generate(np.int32([5, 6, MARK]), Sampling(8, 0.7, (1, 2), 2**64 - 1), request_id="r")  # type: ignore[arg-type]
        body = dict(servers[0].requests[0].body)
        assert body["input_ids"] == [5, 6, MARK]
        assert body["return_logprob"] is True
        assert "logprob_start_len" not in body
        assert "stream" not in body
        sent = body["sampling_params"]
        assert sent == {
            "max_new_tokens": 8, "temperature": 0.7, "stop_token_ids": [1, 2], "sampling_seed": 2**63 - 1,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip


async def test_a_full_request_says_length_and_another_end_token_than_was_asked_for_says_go_on() -> None:
    async with running() as (engine, servers):
        assert (await ask(engine, count=20)).finish_reason == "length"

        def ended(reply: Any) -> None:
            reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": reply["output_ids"][-1]}

        servers[0].order("reply", change=ended)
        completion = await ask(engine, count=20, id="s")
        assert completion.finish_reason == "length"
        servers[0].order("reply", change=ended)
        cut = await engine.generate([5, MARK], Sampling(400, stop_token_ids=(3,)), request_id="t")
        assert (cut.finish_reason, tokens(cut)[-1]) == ("stop", 3)
        servers[0].order("reply", change=ended)
        on = await engine.generate([5, MARK], Sampling(400), request_id="u")
        assert (on.finish_reason, len(tokens(on))) == ("abort", 200)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "an empty prompt"),
        ([5, 264, 1, -1], {}, "token id 264 at position 1 is outside the vocabulary of 264"),
        ([5, 2, -1], {}, "token id -1 at position 2 is outside"),
        ([5, 2.0], {}, "token ids must be integers, these are float64"),
        ([1] * 64, {}, "a prompt of 64 tokens leaves no room in a context of 64"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([1], {"temperature": float("nan")}, "temperature finite"),
    ],
)
async def test_what_a_server_would_choke_on_is_refused_before_it_is_sent(ids: Any, options: Any, message: str) -> None:
    async with running(context_tokens=64) as (engine, servers):
        with pytest.raises(EngineError, match=f"engine 'policy', request 'r': .*{message}"):
            await engine.generate(ids, Sampling(**{"max_new_tokens": 1, **options}), request_id="r")
        assert "/generate" not in routes(servers[0])


async def test_no_more_is_asked_for_than_the_context_has_room_for() -> None:
    async with running(context_tokens=64) as (engine, _):
        assert len(tokens(await ask(engine))) == 61


async def test_an_id_in_flight_is_not_used_twice() -> None:
    async with running() as (engine, servers):
        servers[0].hold_after = 8
        first = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        with pytest.raises(EngineError, match="a request with this id is in flight"):
            await ask(engine)
        servers[0].hold_after = None
        assert tokens(await first) == WHOLE


# ---- versions


async def test_tokens_on_both_sides_of_an_update_have_their_versions_and_nothing_is_aborted(
    weights: Callable[[int], Weights],
) -> None:
    async with running(options={"max_running": 8}) as (engine, servers):
        requests = [asyncio.create_task(ask(engine, f"{n}")) for n in range(16)]
        for version in (3, 4):
            servers[0].hold_after = 40 * (version - 2)
            await servers[0].sampled(40 * (version - 2), requests=8)
            await publish(weights(version), engine)
        servers[0].hold_after = None
        completions = await asyncio.gather(*requests)
        assert {completion.finish_reason for completion in completions} == {"stop"}
        assert all(tokens(completion) == WHOLE and logprobs(completion) == LOGPROBS for completion in completions)
        cut = [completion for completion in completions if versions(completion) == [0, 3, 4]]
        assert {tuple(len(segment) for segment in completion.segments) for completion in cut} == {(40, 40, 120)}
        rest = [versions(completion) for completion in completions if completion not in cut]
        assert (len(cut), rest) == (8, [[4]] * 8)
        updates = [call.body for call in servers[0].requests if call.route == "/update_weights_from_disk"]
        assert [body["abort_all_requests"] for body in updates] == [False, False]
        assert [body["weight_version"].partition("@")[0] for body in updates] == ["3", "4"]


@pytest.mark.parametrize(("wrong", "source"), [("no spans", "reply"), ("no versions", "dispatch")])
async def test_servers_that_say_less_about_versions_are_believed_as_far_as_they_go(wrong: str, source: str) -> None:
    async with running() as (engine, servers):
        servers[0].order("reply", change=WRONG[wrong])
        completion = await ask(engine)
        assert versions(completion) == [0]
        assert engine.stats()[f"versions_from_{source}"] == 1


async def test_nothing_is_sampled_before_weights_have_a_number(weights: Callable[[int], Weights]) -> None:
    async with running(weight_version=None) as (engine, _):
        with pytest.raises(EngineError, match="no weights yet; call update_weights, or give weight_version"):
            await ask(engine)
        with pytest.raises(EngineError, match="no weights yet"):
            _ = engine.weight_version
        await publish(weights(5), engine)
        assert versions(await ask(engine)) == [5]


async def test_servers_with_different_weights_are_adopted_by_none() -> None:
    async with server() as one, server(weight_version="9") as other:
        engine = engine_of(one, other, weight_version=4)
        with pytest.raises(ConfigError, match=r"servers have different weights: .*'default'.*'9'"):
            await engine.open()


# ---- replies that are not what they should be


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no logprobs", "200 output ids but 0 output logprobs"),
        ("first logprob only", "200 output ids but 1 output logprobs"),
        ("a logprob less", "200 output ids but 199"),
        ("an id less", "199 output ids but 200"),
        ("no ids", "0 output ids but 200"),
        ("another id", "output id 199 is 256, but the logprob there is that of 257"),
        ("a wrong count", "completion_tokens is 201, but 200 output ids came"),
        ("short spans", "do not cover the 200 tokens"),
    ],
)
async def test_lengths_and_ids_that_disagree_are_an_error_and_asked_for_once(wrong: str, message: str) -> None:
    async with running() as (engine, servers):
        servers[0].order("reply", change=WRONG[wrong], times=None)
        with pytest.raises(EngineError, match=f"request 'r': {servers[0].url}: .*{message}"):
            await ask(engine)
        assert len(rids(servers[0])) == 1


def _at(place: int, **values: Any) -> Callable[[Any], None]:
    """A reply whose token at `place` has another id or logprob."""

    def change(reply: Any) -> None:
        entry = reply["meta_info"]["output_token_logprobs"][place]
        entry[0] = values.get("logprob", entry[0])
        entry[1] = reply["output_ids"][place] = values.get("id", entry[1])

    return change


def _spans(*spans: tuple[int, int]) -> Callable[[Any], None]:
    said = [{"version": "0", "start": start, "end": end} for start, end in spans]
    return lambda reply: reply["meta_info"].update(weight_versions=said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_at(3, id=-1), "output id 3 is -1, outside the vocabulary of 264"),
        (_at(3, id=264), "output id 3 is 264, outside the vocabulary of 264"),
        (_at(3, id=1.5), "output id 3 is 1.5, outside the vocabulary of 264"),
        (_at(3, id=True), "output id 3 is True, outside the vocabulary of 264"),
        (_at(3, logprob=0.5), "output logprob 3 is 0.5, which is no log-probability"),
        (_at(3, logprob=-1e39), "output logprob 3 is -1e.39, which is no log-probability"),
        (_at(3, logprob=None), "output logprob 3 of 200 is missing"),
        (_spans((0, 150), (150, 50), (50, 200)), "do not cover the 200 tokens"),
        (_spans((0, 150), (100, 200)), "do not cover the 200 tokens"),
    ],
)
async def test_what_is_no_token_no_logprob_or_overlaps_is_an_error(change: Callable[[Any], None], message: str) -> None:
    async with running() as (engine, servers):
        servers[0].order("reply", change=change, times=None)
        with pytest.raises(EngineError, match=f"request 'r': {servers[0].url}: .*{message}"):
            await ask(engine)
        assert len(rids(servers[0])) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply.update(output_ids=7),
        lambda reply: reply["meta_info"].update(output_token_logprobs=[7] * 200),
        lambda reply: reply["meta_info"].update(prompt_tokens="many"),
        lambda reply: reply["meta_info"].update(weight_versions=[{"version": "0"}]),
        lambda reply: reply["meta_info"].update(weight_versions="0"),
        _at(3, logprob="low"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_another_shape_is_not_used_and_the_request_is_tried_again(
    change: Callable[[Any], None], stream: bool
) -> None:
    async with running(options={"incremental": stream}, stream=stream) as (engine, servers):
        servers[0].order("reply", change=change)
        assert tokens(await ask(engine)) == WHOLE
        assert engine.stats()["retries"] == 1


@pytest.mark.parametrize("wrong", ["no finish reason", "another rid"])
async def test_a_reply_to_something_else_is_not_used_and_the_request_is_tried_again(wrong: str) -> None:
    async with running() as (engine, servers):
        servers[0].order("reply", change=WRONG[wrong])
        assert tokens(await ask(engine)) == WHOLE
        assert engine.stats()["retries"] == 1
        assert len(set(rids(servers[0]))) == 2


async def test_a_reply_of_unknown_weights_is_not_used() -> None:
    """As of a server that came back with its base weights between two looks."""
    async with running(number=2) as (engine, servers):

        def base(reply: Any) -> None:
            reply["meta_info"]["weight_versions"][0]["version"] = "base"

        for one in servers:
            one.order("reply", change=base)
        completion = await ask(engine)
        assert (tokens(completion), versions(completion)) == (WHOLE, [0])
        assert engine.stats()["retries"] in (1, 2)


async def test_a_request_is_not_sent_under_weights_that_nobody_published(weights: Callable[[int], Weights]) -> None:
    """As of another run, found by a look whose answer of the router is still to come."""
    async with running(look_every=60.0) as (engine, servers):
        await publish(weights(3), engine)
        engine.fleet.workers[0].weights = "9@another"
        assert versions(await ask(engine)) == [3]
        assert (len(rids(servers[0])), engine.stats()["retries"]) == (1, 1)


ABORTS: dict[str, dict[str, Any]] = {
    "after tokens": {"kind": "abort", "after": 12},
    "before any": {"kind": "abort"},
    "in the queue": {"kind": "abort in queue"},
    "in the queue again": {"kind": "abort in queue", "after": 12},
    "before prefill": {"kind": "abort before prefill"},
}


@pytest.mark.parametrize("shape", ABORTS)
async def test_an_abort_of_any_shape_brings_what_was_sampled(shape: str) -> None:
    async with running() as (engine, servers):
        fault = servers[0].order(**ABORTS[shape])
        completion = await ask(engine)
        assert completion.finish_reason == "abort"
        assert is_beginning(completion)
        assert len(tokens(completion)) == fault.after


async def test_an_abort_that_lost_its_ids_still_has_them_beside_the_logprobs() -> None:
    async with running() as (engine, servers):
        servers[0].order("abort in queue", after=12)
        servers[0].order("reply", change=WRONG["no ids"])
        completion = await ask(engine)
        assert is_beginning(completion)
        assert len(tokens(completion)) == 12


@pytest.mark.parametrize("wrong", ["no logprobs", "a logprob less", "another id", "a wrong count"])
async def test_tokens_of_an_abort_without_their_logprobs_are_left_to_be_sampled_again(wrong: str) -> None:
    async with running() as (engine, servers):
        servers[0].order("abort", after=12)
        servers[0].order("reply", change=WRONG[wrong])
        completion = await ask(engine)
        assert (completion.segments, completion.finish_reason) == ((), "abort")
        assert engine.stats()["discarded"] == 12


# ---- faults


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 500},
        {"kind": "status", "status": 503},
        {"kind": "status", "status": 429},
        {"kind": "abort", "after": 4, "status": 503},
        {"kind": "cut"},
        {"kind": "cut body"},
    ],
    ids=lambda fault: f"{fault['kind']} {fault.get('status', '')}",
)
@pytest.mark.parametrize("number", [1, 2])
async def test_a_request_of_which_nothing_came_is_tried_again(fault: dict[str, Any], number: int) -> None:
    async with running(number) as (engine, servers):
        for one in servers:
            one.order(**fault)
        completion = await ask(engine)
        assert (tokens(completion), logprobs(completion)) == (WHOLE, LOGPROBS)
        assert engine.stats()["tokens"] == 200
        sent = [rid for one in servers for rid in rids(one)]
        assert len(sent) == len(set(sent)) == 1 + engine.stats()["retries"] > 1


@pytest.mark.parametrize(
    "fault", [{"kind": "status", "status": 400}, {"kind": "status", "status": 404}, {"kind": "abort", "status": 400}]
)
async def test_what_a_server_refuses_is_not_asked_for_again(fault: dict[str, Any]) -> None:
    async with running(2) as (engine, servers):
        for one in servers:
            one.order(message="too silly", times=None, **fault)
        with pytest.raises(EngineError, match=r"engine 'policy', request 'r': http.* answered 40[04]: .*too silly"):
            await ask(engine)
        assert sum(len(rids(one)) for one in servers) == 1


async def test_there_is_an_end_to_trying() -> None:
    async with running(max_tries=3) as (engine, servers):
        servers[0].order("status", status=500, message="broken", times=None)
        with pytest.raises(EngineError, match=r"nothing came of 3 tries; the last, at http.*broken"):
            await ask(engine)
        assert len(rids(servers[0])) == 3
        servers[0].faults.clear()
        assert tokens(await ask(engine, "s")) == WHOLE


async def test_a_reply_that_never_comes_is_given_up_and_asked_for_again() -> None:
    async with running(2, request_seconds=0.5) as (engine, servers):
        stalls = [one.order("stall") for one in servers[:1]]
        completions = await asyncio.gather(ask(engine, "a-1/"), ask(engine, "b-1/"))
        assert [tokens(completion) for completion in completions] == [WHOLE, WHOLE]
        assert engine.stats()["retries"] >= 1
        for stall in stalls:
            stall.release()


async def test_a_duplicate_reply_is_used_once() -> None:
    async with running() as (engine, servers):
        servers[0].order("duplicate")
        for n in range(3):
            assert tokens(await ask(engine, f"{n}")) == WHOLE
        assert engine.stats()["tokens"] == 600


async def test_a_server_that_dies_costs_its_requests_nothing() -> None:
    async with running(2) as (engine, servers):
        for one in servers:
            one.hold_after = 8
        requests = [asyncio.create_task(ask(engine, f"{n}-1/")) for n in range(8)]
        for one in servers:
            await one.sampled(8, requests=4)
        servers[0].crash()
        servers[1].hold_after = None
        completions = await asyncio.gather(*requests)
        assert all(tokens(completion) == WHOLE and logprobs(completion) == LOGPROBS for completion in completions)
        assert engine.stats()["tokens"] == 8 * 200
        assert len(rids(servers[1])) == 8


async def test_a_server_whose_connection_broke_is_asked_nothing_until_it_was_looked_at() -> None:
    async with running(2, look_every=60.0) as (engine, servers):
        await asyncio.gather(*(ask(engine, f"{n}-1/") for n in range(8)))
        await servers[0].stop()
        for n in range(8):
            assert tokens(await ask(engine, f"{n}-2/")) == WHOLE
        assert engine.stats()["retries"] == 1
        assert [worker.url for worker in engine.fleet.serving] == [servers[1].url]


async def test_requests_wait_for_the_only_server_to_be_back_at_the_current_weights(
    weights: Callable[[int], Weights],
) -> None:
    async with running() as (engine, servers):
        await publish(weights(3), engine)
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        await servers[0].restart()
        servers[0].hold_after = None
        assert servers[0].weight_version == "default"
        completion = await request
        assert (tokens(completion), versions(completion)) == (WHOLE, [3])
        assert weights_name(servers[0]) == "3"


async def test_of_two_runs_on_a_server_neither_takes_the_weights_of_the_other_for_its_own(
    weights: Callable[[int], Weights],
) -> None:
    async with running() as (engine, servers):
        other = engine_of(*servers)
        await other.open()
        try:
            await publish(weights(3), engine)
            servers[0].hold_after = 8
            request = asyncio.create_task(ask(engine))
            await servers[0].sampled(8)
            await publish(replace(weights(4), version=3), other)
        finally:
            await other.close()
        servers[0].hold_after = None
        completion = await request
        assert (tokens(completion), versions(completion)) == (WHOLE, [3])
        assert [Path(path).name for path, _ in servers[0].control.loaded] == ["step-3", "step-4", "step-3"]


async def test_who_waits_for_a_server_in_vain_is_told_why() -> None:
    async with running(patience=0.1) as (engine, servers):
        await servers[0].stop()
        with pytest.raises(EngineError, match=f"no server to ask: {servers[0].url}: .*(refused|Connect)"):
            await ask(engine)


async def test_a_server_that_falls_silent_loses_its_requests_to_the_others() -> None:
    async with running(2, max_misses=2) as (engine, servers):
        for one in servers:
            one.hold_after = 8
        requests = [asyncio.create_task(ask(engine, f"{n}-1/")) for n in range(4)]
        for one in servers:
            await one.sampled(8, requests=2)
        servers[0].order("status", route="/model_info", status=503, times=None)
        servers[0].order("status", route="/get_model_info", status=503, times=None)
        servers[1].hold_after = None
        completions = await asyncio.gather(*requests)
        assert [tokens(completion) for completion in completions] == [WHOLE] * 4


# ---- ending requests


async def test_aborting_one_of_64_leaves_the_other_63_untouched() -> None:
    async with running() as (engine, servers):
        servers[0].hold_after = 40
        requests = {id: asyncio.create_task(ask(engine, id)) for id in (f"g1-{n}" for n in range(1, 65))}
        await servers[0].sampled(40, requests=64)
        await engine.abort("g1-1")
        await servers[0].received("/abort_request")
        servers[0].hold_after = None
        completions = {id: await request for id, request in requests.items()}
        cut = completions.pop("g1-1")
        assert cut.finish_reason == "abort"
        assert is_beginning(cut)
        assert len(tokens(cut)) >= 40
        assert {completion.finish_reason for completion in completions.values()} == {"stop"}
        assert len(completions) == 63


async def test_an_unknown_id_is_aborted_by_doing_nothing() -> None:
    async with running() as (engine, servers):
        await engine.abort("nobody")
        assert routes(servers[0]) == []


async def test_an_abort_ends_a_request_that_its_server_never_answers() -> None:
    async with running(abort_seconds=0.05) as (engine, servers):
        stall = servers[0].order("stall")
        request = asyncio.create_task(ask(engine))
        await servers[0].received("/generate")
        await engine.abort("r")
        assert await request == Completion((), "abort")
        stall.release()


async def test_a_cancelled_call_ends_its_request_at_the_server() -> None:
    async with running() as (engine, servers):
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await servers[0].received("/abort_request")
        servers[0].hold_after = None
        assert tokens(await ask(engine)) == WHOLE


async def test_a_request_whose_id_a_dead_process_left_at_the_server_is_answered() -> None:
    async with running() as (dead, servers):
        engine = engine_of(*servers)
        await engine.open()
        servers[0].requests.clear()
        servers[0].hold_after = 8
        left, asked = asyncio.create_task(ask(dead)), asyncio.create_task(ask(engine))
        while len(rids(servers[0])) < 2:  # noqa: ASYNC110 -- both are there
            await asyncio.sleep(0.001)
        servers[0].hold_after = None
        assert [tokens(each) for each in await asyncio.gather(left, asked)] == [WHOLE, WHOLE]
        await engine.close()


async def test_clear_ends_the_requests_with_a_prefix_and_no_other() -> None:
    async with running(2) as (engine, servers):
        for one in servers:
            one.hold_after = 8
        requests = {id: asyncio.create_task(ask(engine, id)) for id in ("run.1-1/", "run.2-2/", "run2.1-3/", "ru-4/")}
        for one in servers:
            await one.sampled(8, requests=2)
        await engine.clear("run.")
        for one in servers:
            one.hold_after = None
        ended = {id: (await request).finish_reason for id, request in requests.items()}
        assert ended == {"run.1-1/": "abort", "run.2-2/": "abort", "run2.1-3/": "stop", "ru-4/": "stop"}


# ---- pause


async def test_in_a_pause_nothing_is_sampled_and_what_comes_waits() -> None:
    async with running() as (engine, servers):
        servers[0].hold_after = 8
        running_one = asyncio.create_task(ask(engine, "a"))
        await servers[0].sampled(8)
        await engine.pause()
        servers[0].hold_after = None
        waiting, ended, cancelled = (asyncio.create_task(ask(engine, id)) for id in "bcd")
        await asyncio.sleep(0.02)
        assert len(rids(servers[0])) == 1
        assert (engine.stats()["running"], engine.stats()["waiting"]) == (1, 3)
        await engine.abort("c")
        assert await ended == Completion((), "abort")
        cancelled.cancel()
        await engine.resume()
        assert tokens(await running_one) == tokens(await waiting) == WHOLE
        assert [call.body["mode"] for call in servers[0].requests if call.route == "/pause_generation"] == ["in_place"]


async def test_the_time_of_a_request_stands_still_in_a_pause() -> None:
    async with running(request_seconds=1.0) as (engine, servers):
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        await engine.pause()
        servers[0].hold_after = None
        await asyncio.sleep(1.2)
        await engine.resume()
        assert tokens(await request) == WHOLE
        assert engine.stats()["retries"] == 0


async def test_weights_that_come_in_a_pause_do_not_end_it(weights: Callable[[int], Weights]) -> None:
    async with running() as (engine, servers):
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        await engine.pause()
        servers[0].hold_after = None
        await publish(weights(2), engine)
        assert servers[0].scheduler.paused
        await engine.resume()
        completion = await request
        assert (tokens(completion), versions(completion)) == (WHOLE, [0, 2])


async def test_a_server_that_a_dead_process_left_paused_is_woken() -> None:
    async with server() as one:
        first = engine_of(one)
        await first.open()
        await first.pause()
        await first.close()
        engine = engine_of(one)
        await engine.open()
        assert tokens(await ask(engine)) == WHOLE
        await engine.close()


# ---- weights


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_an_update_in_each_pause_mode_goes_on_under_the_new_weights(
    mode: str, paused: bool, weights: Callable[[int], Weights]
) -> None:
    async with running(pause_mode=mode) as (engine, servers):
        servers[0].hold_after = 40
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(40)
        if paused:
            await engine.pause()
        servers[0].hold_after = None if mode == "abort" else 40
        await publish(weights(2), engine)
        servers[0].hold_after = None
        await engine.resume()
        completion = await request
        assert is_beginning(completion)
        if mode == "abort":
            assert (completion.finish_reason, versions(completion)) == ("abort", [0])
        else:
            assert (tokens(completion), versions(completion)) == (WHOLE, [0, 2])
        assert versions(await ask(engine, "s")) == [2]


async def test_a_look_that_was_under_way_when_an_update_came_cuts_nothing(weights: Callable[[int], Weights]) -> None:
    async with running(look_every=60.0) as (engine, servers):
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        look = servers[0].order("late", route="/model_info")
        engine.fleet.check(engine.fleet.workers[0])
        await servers[0].received("/model_info")
        update = asyncio.create_task(publish(weights(3), engine))
        await asyncio.sleep(0.01)
        look.release()
        await update
        servers[0].hold_after = None
        assert versions(await request) == [0, 3]
        assert engine.stats()["retries"] == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("flush", [True, False])
async def test_prefixes_of_older_weights_are_used_only_where_that_is_wanted(
    mode: str, flush: bool, weights: Callable[[int], Weights]
) -> None:
    async with running(pause_mode=mode, flush_cache=flush) as (engine, _):
        prompt = [*range(200), MARK]
        for n in range(2):
            await engine.generate(prompt, Sampling(4), request_id=f"{n}")
        before = engine.stats()["cached_tokens"]
        assert before > 100
        await publish(weights(2), engine)
        await engine.generate(prompt, Sampling(4), request_id="after")
        assert (engine.stats()["cached_tokens"] == before) is flush


async def test_prefixes_of_another_run_whose_weights_were_called_the_same_are_not_used(
    weights: Callable[[int], Weights],
) -> None:
    async with server() as one:
        for _ in range(2):
            engine = engine_of(one, weight_version=None)
            await engine.open()
            await publish(weights(2), engine)
            await engine.generate([*range(200), MARK], Sampling(4), request_id="r")
            assert engine.stats()["cached_tokens"] == 0
            await engine.close()


async def test_who_does_not_take_the_weights_is_out_until_it_does(
    weights: Callable[[int], Weights], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(2) as (engine, servers):
        fault = servers[0].order("status", route="/update_weights_from_disk", status=400, message="no", times=None)
        await publish(weights(3), engine)
        completions = await asyncio.gather(*(ask(engine, f"{n}-1/") for n in range(8)))
        assert [versions(completion) for completion in completions] == [[3]] * 8
        assert rids(servers[0]) == []
        servers[0].faults.remove(fault)
        while len(engine.fleet.serving) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert weights_name(servers[0]) == "3"
        completions = await asyncio.gather(*(ask(engine, f"{n}-2/") for n in range(8, 16)))
        assert rids(servers[0])
        assert f"{servers[0].url} gets no requests: " in caplog.text


async def test_a_server_that_says_yes_and_keeps_its_weights_is_out(weights: Callable[[int], Weights]) -> None:
    async with running(2, look_every=60.0) as (engine, servers):
        servers[0].order("unchanged", route="/update_weights_from_disk")
        await publish(weights(3), engine)
        assert [worker.url for worker in engine.fleet.serving] == [servers[1].url]
        completions = await asyncio.gather(*(ask(engine, f"{n}-1/") for n in range(4)))
        assert [versions(completion) for completion in completions] == [[3]] * 4


async def test_an_update_that_every_server_refuses_is_an_error_and_nothing_is_sampled(tmp_path: Path) -> None:
    async with running(2) as (engine, servers):
        refused = r"no server took weights 3@.*: .*Cannot find any model weights"
        with pytest.raises(EngineError, match=refused) as caught:
            await engine.update_weights(Weights(3, tmp_path / "empty", lambda: ()))
        assert all(one.url in str(caught.value) for one in servers)
        assert engine.fleet.serving == []


async def test_weights_that_were_not_saved_are_named_with_the_remedy() -> None:
    async with running() as (engine, _):
        with pytest.raises(
            EngineError, match=r"weights come from disk, and version 3 was not saved: give Weights\.path"
        ):
            await engine.update_weights(Weights(3, None, lambda: ()))


async def test_an_update_waits_for_the_only_server(weights: Callable[[int], Weights]) -> None:
    async with running() as (engine, servers):
        await servers[0].stop()
        update = asyncio.create_task(publish(weights(3), engine))
        await asyncio.sleep(0.05)
        await servers[0].restart()
        await update
        assert versions(await ask(engine)) == [3]


async def test_requests_of_a_server_that_failed_an_update_go_elsewhere(weights: Callable[[int], Weights]) -> None:
    async with running(2) as (engine, servers):
        for one in servers:
            one.hold_after = 8
        requests = [asyncio.create_task(ask(engine, f"{n}-1/")) for n in range(4)]
        for one in servers:
            await one.sampled(8, requests=2)
        servers[0].order("status", route="/update_weights_from_disk", status=400, times=None)
        await publish(weights(3), engine)
        servers[1].hold_after = None
        completions = await asyncio.gather(*requests)
        assert [tokens(completion) for completion in completions] == [WHOLE] * 4
        assert sorted(len(versions(completion)) for completion in completions) == [1, 1, 2, 2]


# ---- many servers


async def test_turns_of_an_episode_meet_their_prefix_and_episodes_are_spread() -> None:
    async with running(3) as (engine, servers):
        await asyncio.gather(*(ask(engine, f"run.{n}.0.0-{n}/") for n in range(9)))
        for turn in range(1, 3):
            for n in reversed(range(9)):  # one at a time: by load alone, all would go to one server
                await ask(engine, f"run.{n}.0.0-{10 * turn + n}/", count=4)
        seen = [{rid.rpartition("-")[0] for rid in rids(one)} for one in servers]
        assert [len(episodes) for episodes in seen] == [3, 3, 3]
        assert [len(rids(one)) for one in servers] == [9, 9, 9]


async def test_a_server_joins_and_one_leaves(weights: Callable[[int], Weights]) -> None:
    async with running() as (engine, servers), server() as joined:
        await publish(weights(3), engine)
        servers[0].hold_after = 8
        last = asyncio.create_task(ask(engine, "last"))
        await servers[0].sampled(8)
        await engine.add(joined.url)
        while len(engine.fleet.serving) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await engine.remove(servers[0].url)
        servers[0].hold_after = None
        assert tokens(await last) == WHOLE
        assert versions(await ask(engine, "next")) == [3]
        assert len(rids(servers[0])) == 1


# ---- routers


@asynccontextmanager
async def routed() -> AsyncIterator[tuple[SGLangEngine, SGLangRouter, list[SGLangServer]]]:
    async with server() as one, server() as other, SGLangRouter([one.url, other.url]) as router:
        engine = SGLangEngine(
            [router.url], vocab_size=264, look_every=0.02, back_off=0.01, patience=10.0, weight_version=0
        )
        try:
            await engine.open()
            yield engine, router, [one, other]
        finally:
            await engine.close()


async def test_behind_a_router_aborts_pauses_and_updates_reach_every_server(weights: Callable[[int], Weights]) -> None:
    async with routed() as (engine, _, servers):
        for one in servers:
            one.hold_after = 40
        requests = {n: asyncio.create_task(ask(engine, f"e{n}-1/")) for n in range(16)}
        for one in servers:
            await one.sampled(40)
        while sum(one.scheduler.live != [] and len(one.scheduler.live) for one in servers) < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.gather(*(engine.abort(f"e{n}-1/") for n in range(4)))
        await publish(weights(3), engine)
        await engine.pause()
        assert all(one.scheduler.paused for one in servers)
        await engine.resume()
        for one in servers:
            one.hold_after = None
        completions = {n: await request for n, request in requests.items()}
        assert [n for n, completion in completions.items() if completion.finish_reason == "abort"] == [0, 1, 2, 3]
        assert all(tokens(completions[n]) == WHOLE for n in range(4, 16))
        assert [weights_name(one) for one in servers] == ["3", "3"]
        await asyncio.gather(*(ask(engine, f"e{n}-2/") for n in range(16)))
        homes = [{rid.partition("-")[0] for rid in rids(one) if rid.startswith("e")} for one in servers]
        assert homes[0].isdisjoint(homes[1])


async def test_behind_a_router_a_server_that_died_is_withdrawn_and_brought_back_with_the_weights(
    weights: Callable[[int], Weights],
) -> None:
    async with routed() as (engine, router, servers):
        await publish(weights(3), engine)
        await servers[0].stop()
        completions = await asyncio.gather(*(ask(engine, f"e{n}-1/") for n in range(8)))
        assert [tokens(completion) for completion in completions] == [WHOLE] * 8
        while servers[0].url in router.workers.values():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await servers[0].restart()
        while servers[0].url not in router.workers.values():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert weights_name(servers[0]) == "3"
        completions = await asyncio.gather(*(ask(engine, f"e{n}-2/") for n in range(8)))
        assert {version for completion in completions for version in versions(completion)} == {3}


async def test_who_joins_a_router_gets_the_weights_and_who_leaves_it_is_forgotten(
    weights: Callable[[int], Weights],
) -> None:
    async with routed() as (engine, router, servers), server() as joined:
        await publish(weights(3), engine)
        router.workers["new"] = joined.url
        while len(engine.fleet.serving) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert weights_name(joined) == "3"
        router.workers = {id: url for id, url in router.workers.items() if url != servers[0].url}
        while len(engine.fleet.workers) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        completions = await asyncio.gather(*(ask(engine, f"e{n}-2/") for n in range(8)))
        assert {version for completion in completions for version in versions(completion)} == {3}


# ---- the start


async def test_a_server_that_is_too_old_is_refused_with_both_versions() -> None:
    async with server(version="0.5.5.post3") as old:
        with pytest.raises(ConfigError, match=r"runs SGLang 0\.5\.5\.post3; the oldest that is supported is 0\.5\.6"):
            await engine_of(old).open()


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        ("disk", "/pause_generation"),
        ("disk", "/update_weights_from_disk"),
        ("distributed", "/init_weights_update_group"),
        ("tensor", "/update_weights_from_tensor"),
    ],
)
async def test_a_server_that_lacks_a_call_is_refused_at_the_start(kind: Any, route: str) -> None:
    async with server() as one:
        one.order("status", route=route, status=404, times=None)
        with pytest.raises(ConfigError, match=rf"{one.url} runs SGLang 0\.5\.23, which has no {route}; update it"):
            await engine_of(one, transport=Transport(kind)).open()


async def test_a_server_that_knows_only_the_older_names_is_asked_by_those(weights: Callable[[int], Weights]) -> None:
    async with server() as one:
        for route in ("/server_info", "/model_info"):
            one.order("status", route=route, status=404, times=None)
        engine = engine_of(one)
        await engine.open()
        await publish(weights(3), engine)
        assert versions(await ask(engine)) == [3]
        await engine.close()


async def test_what_another_way_of_the_weights_would_need_may_be_missing() -> None:
    async with server() as one:
        for route in Transport("tensor").routes:
            one.order("status", route=route, status=404, times=None)
        engine = engine_of(one)
        await engine.open()
        await engine.close()


@pytest.mark.parametrize("wrong", ["first logprob only", "no logprobs"])
async def test_a_server_whose_logprobs_are_incomplete_is_refused(wrong: str) -> None:
    async with server() as one:
        one.order("reply", change=WRONG[wrong])
        with pytest.raises(ConfigError, match=f"{one.url}: 4 output ids but . output logprobs"):
            await engine_of(one).open()


async def test_a_start_waits_for_one_server_and_says_which_do_not_answer() -> None:
    async with server() as one:
        url = one.url
        await one.stop()
        engine = engine_of(one, patience=0.1)
        with pytest.raises(
            EngineError, match=f"no SGLang server answers: {url}: .*; start one, or correct engine.urls"
        ):
            await engine.open()
        engine = engine_of(one)
        opening = asyncio.create_task(engine.open())
        await asyncio.sleep(0.05)
        await one.start()
        await opening
        assert tokens(await ask(engine)) == WHOLE
        await engine.close()


async def test_a_server_whose_numbers_cannot_be_read_is_out_by_name_until_they_can() -> None:
    async with server() as one:
        odd = one.order("reply", route="/server_info", change=lambda info: info.update(tp_size="two"), times=None)
        engine = engine_of(one, patience=0.2)
        with pytest.raises(EngineError, match=r"/server_info cannot be read .*'two'"):
            await engine.open()
        one.faults.remove(odd)
        async with running(2) as (engine, servers):
            engine.fleet.workers[1].sglang = ""  # as of one that was away
            servers[1].order("reply", route="/server_info", change=lambda info: info.update(tp_size="two"), times=2)
            engine.fleet.suspect(engine.fleet.workers[1], "it was away")
            async with asyncio.timeout(10):
                while engine.problems():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_closing_ends_whoever_waits() -> None:
    async with running() as (engine, servers):
        servers[0].hold_after = 8
        request = asyncio.create_task(ask(engine))
        await servers[0].sampled(8)
        await engine.close()
        with pytest.raises(EngineError, match="'policy' was closed"):
            await request
        with pytest.raises(EngineError, match="not open"):
            await ask(engine)
