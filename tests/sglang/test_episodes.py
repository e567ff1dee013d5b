"""Whole episodes on real SGLang servers: cut, gone on with, streamed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_agent.config import RolloutConfig
from gspo_agent.engine.publish import publish
from gspo_agent.rollout.events import fold
from gspo_agent.rollout.journal import read_events
from tests.engine.models import scored
from tests.rollout.scene import Run, sampled_again, until, view
from tests.sglang.asking import ON_REAL_SERVERS, PROMPT, logprobs, model, opened, tokens, weights, whole
from tests.sglang.episodes import TURNS, AnyChat, Talk
from tests.sglang.real import RealServer

pytestmark = ON_REAL_SERVERS
CONFIG = RolloutConfig(
    group_size=4, groups_per_step=2, over_provision=1.0, journal_tokens=64, filter_zero_variance=False
)


def run_of(path: Path, engine: Any) -> Run:
    return Run(path / "journal.sqlite", env=Talk, engine=engine, chat=AnyChat(), config=CONFIG)


@pytest.mark.parametrize("stream", [False, True])
async def test_episodes_that_are_cut_in_mid_turn_go_on_in_another_life_with_every_version_exact(
    servers: list[RealServer], directory: Path, tmp_path: Path, stream: bool
) -> None:
    """A cut, a new process' engine at new weights, and an update while they play: three versions, each token's known.
    "retract" computes what was cached anew, so that the logprobs of every version are those of its weights alone."""
    async with opened(servers, pause_mode="retract", stream=stream) as engine:
        await publish(weights(directory, 10), engine)
        with run_of(tmp_path, engine) as run:
            await run.collector.start(12)
            await until(lambda: engine.stats()["tokens"] > 100)
            in_flight = engine.stats()["running"]
            await run.collector.stop()
    assert in_flight
    async with opened(servers, pause_mode="retract", stream=stream) as engine:
        await publish(weights(directory, 11), engine)
        with run_of(tmp_path, engine) as run:
            kept = [slot for group in run.ledger.unfinished() for slot in group.slots]
            before = [
                run.journal.submit(lambda c, s=s.id: read_events(c, s, run.journal.blobs)).result(5) for s in kept
            ]
            begun = {
                (s.group_id, s.number): fold(s.trajectory(), e).token_ids for s, e in zip(kept, before, strict=True)
            }
            await run.collector.start(12)
            await until(lambda: engine.stats()["tokens"] > 100)
            await publish(weights(directory, 12), engine)
            lease = await run.collector.lease(2, step=13)
            await run.collector.stop()
            played = [trajectory for group in lease.groups for trajectory in group.trajectories]
            for slot in kept:
                events = run.journal.submit(lambda c, s=slot.id: read_events(c, s, run.journal.blobs)).result(5)
                recorded = fold(slot.trajectory(), events).trajectory
                (same,) = [t for t in played if (t.group_id, t.index) == (slot.group_id, slot.number)]
                assert view(recorded, versions=True) == view(same, versions=True)
                ids = begun[slot.group_id, slot.number].tolist()
                assert same.token_ids()[: len(ids)].tolist() == ids
    assert sampled_again(tmp_path / "journal.sqlite") == []
    assert {len(trajectory.messages) for trajectory in played} == {2 * TURNS}
    for trajectory in played:
        (row,) = trajectory.rows()
        for version in set(row.weight_versions[row.sampled].tolist()):
            of_it = row.sampled & (row.weight_versions == version)
            expected = scored(model(version % 10), [row.token_ids.tolist()], 1.0)[0].numpy()
            assert np.abs(row.rollout_logprobs[1:][of_it[1:]] - expected[of_it[1:]]).max() < 1e-3
    assert {s.weight_version for t in played for s in t.segments if s.sampled} == {10, 11, 12}


async def test_streamed_tokens_are_seen_as_they_come_and_have_the_versions_that_sampled_them(
    servers: list[RealServer], directory: Path
) -> None:
    async with opened(servers[:1], stream=True, pause_mode="retract") as engine:
        await publish(weights(directory, 10), engine)
        assert [worker.increments for worker in engine.fleet.workers] == [True]
        asked = asyncio.create_task(whole(engine, "0.0.0/0", 300))
        seen = set()
        while not asked.done():
            seen |= set(engine.unjournaled().values())
            if len(seen) == 5:
                await publish(weights(directory, 11), engine)
            await asyncio.sleep(0.002)
        ids, parts = await asked
    assert len(seen) >= 8
    assert len(ids) == len(PROMPT) + 300
    position = len(PROMPT)
    for segment in [segment for part in parts for segment in part.segments]:
        expected = scored(model(segment.weight_version % 10), [ids], 1.0)[0].numpy()  # type: ignore[operator]
        there = expected[position - 1 : position - 1 + len(segment)]
        assert np.abs(segment.logprobs - there).max() < 1e-3  # type: ignore[operator]
        position += len(segment)
    assert {segment.weight_version for part in parts for segment in part.segments} == {10, 11}


async def test_what_came_of_a_stream_that_is_given_up_is_what_was_sampled(
    servers: list[RealServer], directory: Path
) -> None:
    async with opened(servers[:1], stream=True, abort_seconds=0.0) as engine:
        await publish(weights(directory, 10), engine)
        parts: list[Any] = []
        asked = asyncio.create_task(whole(engine, "0.0.0/0", 300, parts))
        while not engine.stats()["rescued"]:
            await until(lambda: sum(engine.unjournaled().values()) > 16)
            await engine.abort(f"0.0.0/0-{len(parts)}")
            await asyncio.sleep(0.01)
        ids, parts = await asked
    expected = scored(model(0), [ids], 1.0)[0][len(PROMPT) - 1 :].numpy()
    assert np.abs(np.concatenate([logprobs(part) for part in parts]) - expected).max() < 1e-4
    assert sum(len(tokens(part)) for part in parts) == 300
