"""A process looks at itself: what every episode waits for, what a kill would cost, what stands still. The clock runs
ahead where a test says so; nothing here sleeps until something is late."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.config import RolloutConfig
from gspo_agent.engine.sglang import SGLangEngine
from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import EnvError
from gspo_agent.messages import call
from gspo_agent.rollout import collector as collector_room
from gspo_agent.rollout import recorder as recorder_room
from gspo_agent.rollout.events import CallBegun
from gspo_agent.rollout.live import Live, read_live
from gspo_agent.rollout.pulse import Pulse
from gspo_agent.rollout.stages import Phase
from gspo_agent.testing import ByteChat, ScriptedEngine
from tests.rollout.scene import CHAT, Run, Shop, shopper, until


class Clock:
    """The real one, put forward at will."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Also the one by which episodes and leases note since when they wait."""
    clock = Clock()
    monkeypatch.setattr(recorder_room, "time", clock)
    monkeypatch.setattr(collector_room, "time", clock)
    return clock


WAITING = Phase("waiting for groups", 0.0)


@contextmanager
def pulse_of(run: Run, clock: Clock, phase: Callable[[], Phase] = lambda: WAITING) -> Iterator[Pulse]:
    """Looks only when it is told to; its thread never starts."""
    pulse = Pulse(run.journal, phase, patience=60.0, clock=clock.monotonic)
    pulse._loop, pulse._loop_thread = asyncio.get_running_loop(), 0
    pulse.watch(run.collector, run.engine)
    yield pulse


async def looks(
    pulse: Pulse, clock: Clock, seconds: int, caplog: pytest.LogCaptureFixture, answers: bool = True
) -> list[str]:
    """Looks every five seconds for so long; the warnings since. `answers`: the journal has time to answer each time."""
    caplog.clear()
    for _ in range(seconds // 5):
        clock.ahead += 5
        pulse.look()
        await asyncio.sleep(0.001)  # a turn of the event loop
        if answers:
            await until(lambda: pulse._journal.writes == 0)
    return [record.getMessage() for record in caplog.records if record.name == "gspo_agent.rollout.pulse"]


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(
        **{"group_size": 2, "groups_per_step": 2, "over_provision": 1.0, "filter_zero_variance": False, **changes}
    )


class Mall(Shop):
    """Group 1 waits in a tool, group 2 in the judge, group 3 in its reset; group 4 comes to no end of its turn."""

    def _group(self) -> int:
        return int(self.episode_id.partition(".")[0])

    async def setup(self, task: dict[str, Any]) -> None:
        self.total, self.tries = 0, 0
        if self._group() == 3:
            await asyncio.sleep(3600)

    @tool
    async def add(self, number: int) -> str:
        """Adds."""
        if self._group() == 1:
            await asyncio.sleep(3600)
        return "0"

    async def score(self, task: dict[str, Any], answer: str) -> float:  # type: ignore[override]
        await asyncio.sleep(3600)
        return 0.0


class Withheld(ScriptedEngine):
    """Requests of group 4 get nothing until they are aborted."""

    async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
        while request_id.split(".")[2] == "4" and request_id not in self._aborted:
            self._live.add(request_id)
            await asyncio.sleep(0.001)
        self._live.discard(request_id)
        return await super().generate(token_ids, sampling, request_id=request_id)


def first_calls(prompt: Sequence[int], seed: int) -> list[int]:
    """A long turn with a call, and then the answer."""
    if prompt.count(ByteChat.ASSISTANT) < 2:
        return CHAT.turn("hm " * 20, call("add", number=1))
    return CHAT.turn("done")


async def test_the_record_says_what_every_episode_waits_for(fast_path: Path, clock: Clock) -> None:
    settings = config(groups_per_step=4, max_in_flight=8, over_provision=1.5)
    with (
        Run(fast_path / "journal.sqlite", Mall, settings, engine=Withheld(first_calls)) as run,
        pulse_of(run, clock) as pulse,
    ):
        await run.collector.start(0)
        await until(lambda: Counter(r.stage for r in run.collector.live().active)["judges"] == 2)
        await until(lambda: len(run.collector.live().places) == 4)
        clock.ahead = 100
        live = pulse.look()
        waiting = Counter(episode.waiting_for for episode in live.in_flight)
        assert waiting == {"tool add": 2, "the judge": 2, "the reset": 2, "tokens": 2, "a place": 4}
        assert {episode.waiting_for: episode.turn for episode in live.in_flight}["the judge"] == 1
        assert all(99 < e.since < 110 for e in live.in_flight if e.waiting_for != "a place")
        await run.collector.stop()


async def test_what_is_counted_as_lost_is_what_a_cut_brings_home(fast_path: Path, clock: Clock) -> None:
    engine = ScriptedEngine(first_calls, chunk=4)
    engine.hold_at = 340
    with (
        Run(fast_path / "journal.sqlite", Shop, config(journal_tokens=48), engine=engine) as run,
        pulse_of(run, clock) as pulse,
    ):
        await run.collector.start(0)
        await until(lambda: len(engine.held) == 4)
        await run.journal.transact(lambda connection: None)
        live = pulse.look()
        assert live.loss.requests == 4
        assert 0 < live.loss.sampled < live.loss.at_most <= 4 * 48
        assert sum(episode.unjournaled for episode in live.in_flight) == live.loss.sampled
        before = len(engine.requests)
        await run.collector.stop()
        assert sum(tokens for *_, tokens in engine.requests[before:]) == live.loss.sampled
        after = pulse.look(ended=True)
        assert after.loss == (0, 0, 0)
        assert read_live(fast_path) == after
        assert after.owner.ended


async def test_an_engine_that_does_not_count_is_taken_to_hold_all_it_was_asked_for(
    fast_path: Path, clock: Clock
) -> None:
    engine = ScriptedEngine(first_calls, chunk=4)
    await engine.pause()
    with (
        Run(fast_path / "journal.sqlite", Shop, config(journal_tokens=48), engine=engine) as run,
        pulse_of(run, clock) as pulse,
    ):
        pulse.watch(run.collector, object())
        await run.collector.start(0)
        await until(lambda: sum(bool(r.request_id) for r in run.collector.live().active) == 4)
        assert pulse.look().loss == (4, 4 * 48, 4 * 48)
        await run.collector.stop()


async def test_a_tool_that_hangs_is_named_with_an_example(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(Shop):
        @tool
        async def add(self, number: int) -> str:
            """Adds."""
            await asyncio.sleep(3600)
            return ""

    with Run(fast_path / "journal.sqlite", Hanging, config()) as run, pulse_of(run, clock) as pulse:
        await run.collector.start(0)
        await until(lambda: Counter(r.stage for r in run.collector.live().active)["tools"] == 4)
        assert await looks(pulse, clock, 60, caplog) == []
        (said,) = await looks(pulse, clock, 10, caplog)
        assert said.startswith("tools: no progress for 6")
        assert re.search(r"; 4 wait, such as [12]\.[01]\.0 waits for tool add", said)  # whichever came there first
        assert pulse.concerns() in {said, str(pulse.watchdog.still[0])}
        assert [each.stage for each in pulse.look().still] == ["tools"]
        await run.collector.stop()


async def test_an_engine_that_stopped_is_named_and_one_that_is_paused_is_not(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(shopper, chunk=4)
    engine.hold_at = 340
    phase = WAITING
    with (
        Run(fast_path / "journal.sqlite", Shop, config(), engine=engine) as run,
        pulse_of(run, clock, lambda: phase) as pulse,
    ):
        await run.collector.start(0)
        await until(lambda: len(engine.held) == 4)
        await run.collector.pause()
        phase = Phase("learning", clock.monotonic(), 0)
        said = await looks(pulse, clock, 70, caplog)
        assert [line.partition(" for")[0] for line in said] == ["learner: no progress"]
        assert {episode.waiting_for for episode in pulse.look().in_flight} == {"the learner"}
        await run.collector.resume()
        phase = WAITING
        (said_of_tokens,) = await looks(pulse, clock, 70, caplog)
        assert said_of_tokens.startswith("tokens: no progress for 6")
        engine.hold_at = None
        await until(lambda: run.collector.progress().ready_groups)
        assert await looks(pulse, clock, 5, caplog) == []
        assert pulse.concerns() == ""
        await run.collector.stop()


async def test_a_writer_that_hangs_is_named(fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    with Run(fast_path / "journal.sqlite") as run, pulse_of(run, clock) as pulse:
        pulse.look()
        run.journal.submit(lambda connection: go_on.wait(20))
        said = await looks(pulse, clock, 70, caplog, answers=False)
        go_on.set()
        assert [line.partition(" for")[0] for line in said] == ["journal: no progress"]


async def test_code_that_blocks_the_event_loop_is_named_with_its_line(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(fast_path / "journal.sqlite") as run, pulse_of(run, clock) as pulse:
        pulse._loop_thread = threading.get_ident()
        for _ in range(14):  # nothing is awaited: the loop has no turn
            clock.ahead += 5
            run.journal.flush()
            pulse.look()
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith("event loop: no progress for 6")
        assert "pulse.py" in said
        assert await looks(pulse, clock, 70, caplog) == []


class Fixed(ToolEnv):
    """Every answer has the same reward."""

    def prompt(self, task: dict[str, Any]) -> str:
        return "go"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 1.0


async def test_a_run_whose_groups_are_all_of_equal_rewards_says_so(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(filter_zero_variance=True, max_filtered=3.0)
    engine = ScriptedEngine(lambda prompt, seed: CHAT.turn("done"))
    with (
        Run(fast_path / "journal.sqlite", Fixed, settings, engine=engine) as run,
        pulse_of(run, clock) as pulse,
    ):
        await run.collector.start(0)
        await until(lambda: run.collector.progress().ready_groups >= 8)
        (said,) = await looks(pulse, clock, 20, caplog)
        assert said == "nothing to learn: in each of the last 8 groups all rewards were equal"
        assert pulse.look().remarks == (said,)
        await run.collector.stop()


async def test_a_run_whose_attempts_all_fail_says_so_long_before_it_stops(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_room, "_FIRST_BACK_OFF", 0.0)

    class Dead(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            raise EnvError("no such table")

    with Run(fast_path / "journal.sqlite", Dead, config(max_failed=1.0)) as run, pulse_of(run, clock) as pulse:
        await run.collector.start(0)
        await until(lambda: run.collector.live().failed >= 8)
        pulse.look()
        (said,) = [record.getMessage() for record in caplog.records if "attempts" in record.getMessage()]
        assert said.endswith("attempts all failed, the last one with EnvError: no such table")
        await run.collector.stop()


class OneHangs(Shop):
    """The second member of the first group never comes back from its tool."""

    @tool
    async def add(self, number: int) -> str:
        """Adds."""
        if self.episode_id.startswith("1.1."):
            await asyncio.sleep(3600)
        return "7"


async def test_one_episode_that_never_returns_is_named_though_everything_else_moves(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(fast_path / "journal.sqlite", OneHangs, config(over_provision=2.0)) as run, pulse_of(run, clock) as pulse:
        await run.collector.start(0)
        lease = await run.collector.lease(2, step=1)
        await run.ledger.commit_step(1, lease, ("step-1", "h"), {})
        await until(lambda: [r.stage for r in run.collector.live().active] == ["tools"])
        pulse.look()
        # The others go on: there is something new in the tools at every look, and it comes out again.
        clock.ahead += 61
        said = await looks(pulse, clock, 5, caplog)
        assert not [line for line in said if "does not come back" in line]
        said = await looks(pulse, clock, 5, caplog)
        (line,) = [line for line in said if "does not come back" in line]
        assert line.startswith("an episode does not come back: 1.1.0 waits for tool add for 7")
        await run.collector.stop()


async def test_a_learner_without_a_batch_hears_which_group_it_waits_for(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(fast_path / "journal.sqlite", OneHangs, config()) as run, pulse_of(run, clock) as pulse:
        await run.collector.start(0)
        waiting = asyncio.create_task(run.collector.lease(2, step=1))
        await until(lambda: run.collector.progress().ready_groups == 1 and run.collector.progress().in_flight == 1)
        said = await looks(pulse, clock, 70, caplog)
        batch = [line for line in said if line.startswith("no batch")]
        assert len(batch) == 1
        assert "1 of 2 groups ready; group 1 lacks 1, such as 1.1.0 waits for tool add for 6" in batch[0]
        waiting.cancel()
        await run.collector.stop()


async def test_what_cannot_be_written_stops_nothing_and_leaves_nothing(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(fast_path / "journal.sqlite") as run, pulse_of(run, clock) as pulse:
        (fast_path / "live.json.tmp").mkdir()
        said = await looks(pulse, clock, 20, caplog)
        assert len(said) == 1
        assert "live.json cannot be written" in said[0]
        (fast_path / "live.json.tmp").rmdir()
        pulse.look()
        assert read_live(fast_path) is not None
        (fast_path / "live.json").unlink()
        (fast_path / "live.json" / "in the way").mkdir(parents=True)
        assert len(await looks(pulse, clock, 5, caplog)) == 1
        assert not (fast_path / "live.json.tmp").exists()


async def test_a_journal_that_cannot_answer_goes_on_writing(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(fast_path / "journal.sqlite") as run, pulse_of(run, clock) as pulse:
        await run.journal.transact(lambda c: c.execute("DROP TABLE leases"))
        (said,) = await looks(pulse, clock, 5, caplog)
        assert "no such table: leases" in said
        await run.journal.durable(1, CallBegun("a", "f", {}))


async def test_its_thread_writes_by_itself_and_a_last_record_at_the_end(fast_path: Path) -> None:
    def record() -> Live:
        live = read_live(fast_path)
        assert live is not None
        return live

    with Run(fast_path / "journal.sqlite") as run:
        with Pulse(run.journal, lambda: WAITING, patience=60.0, every=0.01) as pulse:
            pulse.watch(run.collector, run.engine)
            await until(lambda: (fast_path / "live.json").exists() and record().ledger is not None)
            assert not record().owner.ended
        pulse.look()  # as its thread might, late
        assert record().owner.ended
        status = record().ledger
        assert status is not None
        assert status.life == 1


async def test_a_run_whose_servers_have_no_weights_yet_is_looked_at(fast_path: Path, clock: Clock) -> None:
    with Run(fast_path / "journal.sqlite") as run, pulse_of(run, clock) as pulse:
        pulse.watch(run.collector, SGLangEngine([], vocab_size=9))
        pulse.look()
        assert read_live(fast_path) is not None


async def test_a_look_that_fails_does_not_end_the_looking(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(1000))

    def phase() -> Phase:
        if next(calls) == 0:
            raise RuntimeError("a fault of its own")
        return WAITING

    with Run(fast_path / "journal.sqlite") as run, Pulse(run.journal, phase, patience=60.0, every=0.01):
        await until(lambda: read_live(fast_path) is not None)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_last_look_that_fails_does_not_hide_what_ended_the_run(
    fast_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory was moved away, or the look itself is at fault."""

    def phase() -> Phase:
        raise RuntimeError("a fault of its own")

    (fast_path / "run").mkdir()
    with Run(fast_path / "run" / "journal.sqlite") as run:
        with pytest.raises(EnvError, match="what ended it"), Pulse(run.journal, phase, patience=60.0):
            raise EnvError("what ended it")
        pulse = Pulse(run.journal, lambda: WAITING, patience=60.0)
        (fast_path / "run").rename(fast_path / "moved")
        with pytest.raises(EnvError, match="what ended it"), pulse:
            raise EnvError("what ended it")
    assert any("live.json cannot be written" in record.message for record in caplog.records)


async def test_looks_at_once_do_not_take_each_others_record_away(
    fast_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(fast_path / "journal.sqlite") as run, pulse_of(run, clock) as pulse:
        at_once = [threading.Thread(target=lambda: [pulse.look() for _ in range(200)]) for _ in range(4)]
        for thread in at_once:
            thread.start()
        for thread in at_once:
            await asyncio.to_thread(thread.join)
    assert "cannot be written" not in caplog.text
