from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from gspo_agent.engine.base import Completion, Sampling, Weights
from gspo_agent.engine.local import LocalEngine
from gspo_agent.errors import ConfigError, EngineError
from tests.engine.models import VOCAB, qwen3, scored, weights_of


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(qwen3(), max_running=8)
    yield engine
    await engine.close()


def prompt(seed: int, length: int | None = None) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length or rng.randint(5, 60))]


def tokens(completion: Completion) -> list[int]:
    return [int(token) for segment in completion.segments for token in segment.token_ids]


def logprobs(completion: Completion) -> np.ndarray:
    return np.concatenate([segment.logprobs for segment in completion.segments])


async def ask(
    engine: LocalEngine, ids: list[int], count: int = 20, *, seed: int | None = 0, id: str = "r", **options: object
) -> Completion:
    return await engine.generate(ids, Sampling(count, seed=seed, **options), request_id=id)  # type: ignore[arg-type]


async def until(engine: LocalEngine, key: str, value: int) -> None:
    while engine.stats()[key] < value:  # noqa: ASYNC110 -- what the thread has done so far is seen only from outside
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_full_forward_pass(engine: LocalEngine, temperature: float) -> None:
    prompts = [prompt(seed) for seed in range(20)]
    completions = await asyncio.gather(
        *(ask(engine, ids, 5 + n, seed=n, id=str(n), temperature=temperature) for n, ids in enumerate(prompts))
    )
    rows = [ids + tokens(completion) for ids, completion in zip(prompts, completions, strict=True)]
    expected = scored(qwen3(), rows, temperature or 1.0)
    for ids, completion, values in zip(prompts, completions, expected, strict=True):
        np.testing.assert_allclose(logprobs(completion), values[len(ids) - 1 :], atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_on_policy_the_mean_log_ratio_is_zero_over_three_tool_turns(temperature: float) -> None:
    engine = LocalEngine(qwen3(), max_running=6)

    async def episode(n: int) -> tuple[list[int], list[bool], list[float]]:
        ids, seen = prompt(n // 4), []
        sampled, recorded = [False] * len(ids), [0.0] * len(ids)
        for turn in range(4):
            completion = await ask(engine, ids, 8 + n % 7, seed=n, id=f"{n}/{turn}", temperature=temperature)
            tail = prompt(100 * n + turn, 7)
            seen = tokens(completion)
            ids = ids + seen + tail
            sampled += [True] * len(seen) + [False] * len(tail)
            recorded += [*logprobs(completion).tolist(), *[0.0] * len(tail)]
        return ids, sampled, recorded

    episodes = await asyncio.gather(*(episode(n) for n in range(12)))
    await engine.close()
    for values, (_, sampled, recorded) in zip(
        scored(qwen3(), [ids for ids, _, _ in episodes], temperature), episodes, strict=True
    ):
        mask = np.array(sampled[1:])
        assert mask.sum() >= 32
        assert abs((values.numpy() - np.array(recorded[1:]))[mask].mean()) < 1e-5


async def test_draws_depend_on_seed_and_position_and_not_on_the_company() -> None:
    alone, together = LocalEngine(qwen3(), max_running=1), LocalEngine(qwen3(), max_running=16)
    requests = [(prompt(n % 5), 3 + n) for n in range(16)]
    in_company = await asyncio.gather(
        *(ask(together, ids, count, seed=n, id=str(n)) for n, (ids, count) in enumerate(requests))
    )
    for n, (ids, count) in enumerate(requests):
        assert tokens(await ask(alone, ids, count, seed=n)) == tokens(in_company[n])
    assert tokens(in_company[0]) != tokens(in_company[5])[:3] or tokens(in_company[1]) != tokens(in_company[6])[:4]
    await alone.close()
    await together.close()


async def test_without_a_seed_draws_differ(engine: LocalEngine) -> None:
    first, second = await ask(engine, [1, 2, 3], seed=None), await ask(engine, [1, 2, 3], seed=None)
    assert tokens(first) != tokens(second)


async def test_a_request_cut_at_any_token_draws_the_same_tokens(engine: LocalEngine) -> None:
    whole = tokens(await ask(engine, prompt(3), 24, seed=9))
    fresh = LocalEngine(qwen3(), max_running=8)
    for cut in range(1, 24):
        first = await ask(engine, prompt(3), cut, seed=9)
        rest = await ask(fresh if cut % 2 else engine, prompt(3) + tokens(first), 24 - cut, seed=9)
        assert tokens(first) + tokens(rest) == whole
    await fresh.close()


async def test_weights_change_under_a_request_and_old_keys_are_not_used(engine: LocalEngine) -> None:
    running = asyncio.gather(*(ask(engine, prompt(n), 150, seed=n, id=str(n)) for n in range(4)))
    await until(engine, "tokens", 100)
    await engine.update_weights(weights_of(qwen3(seed=1), 7))
    assert engine.weight_version == 7
    for n, completion in enumerate(await running):
        assert [segment.weight_version for segment in completion.segments] == [0, 7]
        row = prompt(n) + tokens(completion)
        assert len(row) == len(prompt(n)) + 150
        cut = len(prompt(n)) - 1 + len(completion.segments[0])
        old, new = (scored(qwen3(seed=seed), [row], 1.0)[0] for seed in (0, 1))
        expected = torch.cat([old[len(prompt(n)) - 1 : cut], new[cut:]])
        np.testing.assert_allclose(logprobs(completion), expected, atol=1e-6)


async def test_kept_prefixes_do_not_outlive_their_weights(engine: LocalEngine) -> None:
    ids = prompt(1, 40)
    await ask(engine, ids)
    await engine.update_weights(weights_of(qwen3(seed=1), 1))
    completion = await ask(engine, ids)
    assert engine.stats()["cached_tokens"] == 0
    expected = scored(qwen3(seed=1), [ids + tokens(completion)], 1.0)[0]
    np.testing.assert_allclose(logprobs(completion), expected[len(ids) - 1 :], atol=1e-6)


async def test_weights_that_do_not_fit_are_refused_whole(engine: LocalEngine) -> None:
    before = tokens(await ask(engine, [1, 2, 3]))
    names = dict(qwen3(seed=1).state_dict())
    wrong = [
        ({**names, "model.extra": torch.zeros(1)}, "model.extra is not in the model"),
        ({**names, "model.norm.weight": torch.zeros(3)}, r"model.norm.weight has shape \(3,\)"),
        ({name: t for name, t in names.items() if name != "model.norm.weight"}, "model.norm.weight is missing"),
    ]
    for tensors, message in wrong:
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(Weights(5, None, lambda tensors=tensors: tensors.items()))
    assert engine.weight_version == 0
    assert tokens(await ask(engine, [1, 2, 3])) == before


async def test_the_model_is_copied(engine: LocalEngine) -> None:
    model = qwen3()
    own = LocalEngine(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert tokens(await ask(own, [1, 2, 3])) == tokens(await ask(engine, [1, 2, 3]))
    await own.close()


async def test_pause_stops_all_computing_and_resume_goes_on(engine: LocalEngine) -> None:
    expected = tokens(await ask(engine, prompt(1), 100))
    running = asyncio.create_task(ask(engine, prompt(1), 100))
    await until(engine, "tokens", 120)
    await engine.pause()
    before = engine.stats()
    waiting = asyncio.create_task(ask(engine, prompt(2), 5, id="later"))
    await asyncio.sleep(0.05)
    assert engine.stats()["tokens"] == before["tokens"] < 200
    assert not running.done()
    await engine.resume()
    assert tokens(await running) == expected
    assert len(tokens(await waiting)) == 5


async def test_what_a_kill_would_lose_is_what_an_abort_brings(engine: LocalEngine) -> None:
    names = [f"{n}/" for n in range(12)]  # more than run at once
    requests = {id: asyncio.create_task(ask(engine, prompt(n), 400, id=id)) for n, id in enumerate(names)}
    await until(engine, "tokens", 50)
    await engine.pause()
    counted = engine.unjournaled()
    assert counted.keys() == requests.keys()
    for id in names:
        await engine.abort(id)
    assert counted == {id: len(tokens(await request)) for id, request in requests.items()}
    assert sum(counted.values()) >= 50
    assert engine.unjournaled() == {}


async def test_weights_change_while_paused(engine: LocalEngine) -> None:
    await engine.pause()
    asked = asyncio.create_task(ask(engine, [1, 2, 3]))
    await engine.update_weights(weights_of(qwen3(seed=1), 3))
    assert not asked.done()
    await engine.resume()
    assert [segment.weight_version for segment in (await asked).segments] == [3]


async def test_abort_returns_what_there_is_and_leaves_the_others_alone(engine: LocalEngine) -> None:
    whole = {n: tokens(await ask(engine, prompt(n), 150, seed=n)) for n in range(4)}
    tasks = {n: asyncio.create_task(ask(engine, prompt(n), 150, seed=n, id=str(n))) for n in range(4)}
    await until(engine, "tokens", 700)
    await engine.abort("1")
    await engine.abort("unknown")
    cut = await tasks[1]
    assert cut.finish_reason == "abort"
    assert 0 < len(tokens(cut)) < 150
    assert tokens(cut) == whole[1][: len(tokens(cut))]
    rest = await ask(engine, prompt(1) + tokens(cut), 150 - len(tokens(cut)), seed=1, id="1")
    assert tokens(cut) + tokens(rest) == whole[1]
    for n in (0, 2, 3):
        assert tokens(await tasks[n]) == whole[n]


async def test_clear_ends_the_requests_of_one_run_and_no_other(engine: LocalEngine) -> None:
    ids = ["run1.1.2.0.0-1/", "run1.1.2.0.0-2/", "run1.3.1.1.0-7/", "run10.1.2.0.0-1/", "run.1.2.0.0-1/"]
    tasks = [asyncio.create_task(ask(engine, prompt(n), 150, seed=n, id=id)) for n, id in enumerate(ids)]
    await until(engine, "running", len(ids))
    await engine.clear("run1.")
    await engine.clear("run2.")
    assert [(await task).finish_reason for task in tasks] == ["abort"] * 3 + ["length"] * 2


async def test_abort_ends_the_one_request_of_this_id_whatever_other_ids_begin_with(engine: LocalEngine) -> None:
    ids = ["g1-1", "g1-10", "g1-1/2", "g1-", "G1-1"]
    tasks = {id: asyncio.create_task(ask(engine, prompt(n), 150, seed=n, id=id)) for n, id in enumerate(ids)}
    await until(engine, "running", len(ids))
    await engine.abort("g1-1")
    assert (await tasks.pop("g1-1")).finish_reason == "abort"
    for task in tasks.values():
        completion = await task
        assert (completion.finish_reason, len(tokens(completion))) == ("length", 150)


async def test_abort_of_a_request_that_waits_brings_nothing(engine: LocalEngine) -> None:
    await engine.pause()
    waiting = asyncio.create_task(ask(engine, [1, 2, 3], id="x"))
    await asyncio.sleep(0)
    await engine.abort("x")
    assert await waiting == Completion((), "abort")


async def test_cancelling_a_call_frees_its_row(engine: LocalEngine) -> None:
    task = asyncio.create_task(ask(engine, [1, 2, 3], 250))
    await until(engine, "running", 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(tokens(await ask(engine, [1, 2, 3], 5))) == 5
    assert engine.stats()["running"] == 0


async def test_a_stop_token_ends_the_request_and_is_its_last_token(engine: LocalEngine) -> None:
    free = tokens(await ask(engine, prompt(5), 40))
    stop = free[20]
    completion = await ask(engine, prompt(5), 40, stop_token_ids=(stop,))
    assert completion.finish_reason == "stop"
    assert tokens(completion) == free[: free.index(stop) + 1]


async def test_max_new_tokens_and_the_context_end_a_request(engine: LocalEngine) -> None:
    short = await ask(engine, [1, 2, 3], 1)
    assert (len(tokens(short)), short.finish_reason) == (1, "length")
    full = await ask(engine, prompt(0, 250), 100)
    assert (len(tokens(full)), full.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], Sampling(5), "empty prompt"),
        ([1, VOCAB], Sampling(5), f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([1, -1], Sampling(5), "token id -1"),
        ([1] * 256, Sampling(5), "256 tokens leaves no room in a context of 256"),
        ([1], Sampling(0), "max_new_tokens"),
        ([1], Sampling(5, temperature=-1.0), "temperature"),
        ([1], Sampling(5, temperature=float("nan")), "temperature"),
    ],
)
async def test_what_cannot_be_generated_from_is_refused(
    engine: LocalEngine, ids: list[int], sampling: Sampling, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await engine.generate(ids, sampling, request_id="r")


async def test_two_requests_of_one_id_are_refused(engine: LocalEngine) -> None:
    first = asyncio.create_task(ask(engine, [1, 2, 3]))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="in flight"):
        await ask(engine, [1, 2, 3])
    assert len(tokens(await first)) == 20


async def test_the_turns_of_an_episode_are_not_computed_again(engine: LocalEngine) -> None:
    ids = prompt(2, 70)
    for turn in range(3):
        before = engine.stats()
        ids = [*ids, *tokens(await ask(engine, ids, 12)), *prompt(50 + turn, 9)]
        computed = engine.stats()["prefill_tokens"] - before["prefill_tokens"]
        # The tail of 9, and the last sampled token, which nobody has shown to the model yet.
        assert computed == (70 if turn == 0 else 10)


async def test_a_cut_request_is_computed_again_under_new_weights_alone_and_the_counts_say_so(
    engine: LocalEngine,
) -> None:
    """A partial rollout that goes on under the weights that sampled it finds its keys and values; under others all of
    it is computed anew, for theirs would be of no model."""
    begun = tokens(await ask(engine, prompt(4, 50), 40, seed=3))

    async def gone_on_with(id: str) -> tuple[int, int]:
        before = engine.stats()
        await ask(engine, [*prompt(4, 50), *begun], 10, seed=3, id=id)
        after = engine.stats()
        return tuple(after[name] - before[name] for name in ("cached_tokens", "prefill_tokens"))  # type: ignore[return-value]

    assert await gone_on_with("same") == (89, 1)
    await engine.update_weights(weights_of(qwen3(seed=1), 2))
    assert await gone_on_with("new") == (0, 90)


async def test_the_siblings_of_a_group_share_their_prompt(engine: LocalEngine) -> None:
    await asyncio.gather(*(ask(engine, prompt(3, 64), 10, seed=n, id=str(n)) for n in range(8)))
    assert engine.stats()["prefill_tokens"] == 64 + 7
    assert engine.stats()["cached_tokens"] == 7 * 63


async def test_more_requests_than_rows_all_come_to_an_end() -> None:
    engine = LocalEngine(qwen3(), max_running=3, cache_bytes=20_000)
    lengths = [random.Random(n).randint(1, 60) for n in range(30)]
    done = await asyncio.gather(*(ask(engine, prompt(n), c, seed=n, id=str(n)) for n, c in enumerate(lengths)))
    assert [len(tokens(completion)) for completion in done] == lengths
    assert engine.stats()["cache_bytes"] <= 20_000
    await engine.close()


async def test_a_failing_step_fails_the_requests_and_not_the_engine() -> None:
    engine = LocalEngine(qwen3(), max_running=2)
    broken = True

    def hook(*_: object) -> None:
        if broken and engine.stats()["tokens"] > 10:
            raise MemoryError("no room")

    engine._decoder.model.register_forward_pre_hook(hook)
    results = await asyncio.gather(*(ask(engine, [1, 2, n], id=str(n)) for n in range(5)), return_exceptions=True)
    assert all(isinstance(result, EngineError) and "MemoryError: no room" in str(result) for result in results)
    broken = False
    assert len(tokens(await ask(engine, [1, 2, 3]))) == 20
    await engine.close()


async def test_weights_that_give_no_number_fail_the_request(engine: LocalEngine) -> None:
    model = qwen3()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    await engine.update_weights(weights_of(model, 4))
    failed = await asyncio.gather(*(ask(engine, prompt(n, 40), id=str(n)) for n in range(2)), return_exceptions=True)
    assert all("weights 4 give nan" in str(error) for error in failed)
    await engine.update_weights(weights_of(qwen3(), 5))
    # A long row makes the short one's unused columns part of the window: nothing of before may be in them.
    done = await asyncio.gather(ask(engine, prompt(5, 60), id="long"), ask(engine, prompt(6, 10), id="short"))
    assert [len(tokens(completion)) for completion in done] == [20, 20]


async def test_close_ends_the_thread_and_fails_whoever_waits() -> None:
    engine = LocalEngine(qwen3(), name="mine")
    task = asyncio.create_task(ask(engine, [1, 2, 3], 250))
    await until(engine, "running", 1)
    assert any(thread.name == "engine-mine" for thread in threading.enumerate())
    await engine.close()
    await engine.close()
    assert not any(thread.name == "engine-mine" for thread in threading.enumerate())
    with pytest.raises(EngineError, match="'mine' was closed"):
        await task
    with pytest.raises(EngineError, match="'mine' was closed"):
        await ask(engine, [1, 2, 3])


async def test_a_directory_is_loaded_and_a_wrong_one_named(tmp_path: Path, engine: LocalEngine) -> None:
    qwen3().save_pretrained(tmp_path / "model")
    loaded = LocalEngine(tmp_path / "model")
    assert tokens(await ask(loaded, [1, 2, 3])) == tokens(await ask(engine, [1, 2, 3]))
    await loaded.close()
    with pytest.raises(ConfigError, match="nowhere"):
        LocalEngine(tmp_path / "nowhere")


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**GROUPED)),
        (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=16)),
        (Gemma3ForCausalLM, Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=16, sliding_window_pattern=2)),
        (GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    ],
    ids=["llama", "mistral", "gemma3", "gpt2"],
)
async def test_other_architectures_too(kind: type[PreTrainedModel], config: object) -> None:
    torch.manual_seed(0)
    model = kind(config).eval()
    engine = LocalEngine(model, max_running=4)
    prompts = [prompt(n) for n in range(6)]
    done = await asyncio.gather(*(ask(engine, ids, 20 + n, seed=n, id=str(n)) for n, ids in enumerate(prompts)))
    for n, (ids, completion) in enumerate(zip(prompts, done, strict=True)):
        again = await ask(engine, [*ids, *tokens(completion), 1, 2], 10, seed=n)
        row = [*ids, *tokens(completion), 1, 2, *tokens(again)]
        expected = scored(model, [row], 1.0)[0][len(ids) - 1 :]
        np.testing.assert_allclose(logprobs(completion), expected[: 20 + n], atol=1e-6)
        np.testing.assert_allclose(logprobs(again), expected[-10:], atol=1e-6)
    await engine.close()


def test_a_model_with_a_recurrent_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="MambaForCausalLM keeps more than keys and values"):
        LocalEngine(MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)))
