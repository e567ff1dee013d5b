"""What a killed process leaves: handles that go on, handles that are gone, leftovers, calls cut in between."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.env import tool
from tests.rollout.mortal import STORIES, Container, alive, all_in_the_second_turn, killed, sleeper
from tests.rollout.scene import play_to_the_end, until, view


async def whole(story: str, folder: Path) -> list[Any]:
    """The same story, uncut."""
    folder.mkdir()  # noqa: ASYNC240
    with STORIES[story].run(folder / "journal.sqlite") as run:
        return [view(trajectory) for trajectory in await play_to_the_end(run)]


@pytest.mark.parametrize("story", ["math", "code", "database"])
async def test_an_episode_goes_on_in_a_new_process_as_its_uncut_twin(fast_path: Path, story: str) -> None:
    twins = await whole(story, fast_path / "whole")
    path = fast_path / "journal.sqlite"
    killed(story, path)
    with STORIES[story].run(path) as run:
        assert run.ledger.status().slots == {"running": 3}
        resumed = await play_to_the_end(run)
        assert run.collector.progress().restarts == 0
    assert [view(trajectory) for trajectory in resumed] == twins
    assert {trajectory.reward for trajectory in resumed} == {1.0}


@pytest.fixture(autouse=True)
def nothing_is_left_outside(fast_path: Path) -> Iterator[None]:
    yield
    for pid in homes(fast_path / "outside").values():
        os.kill(pid, signal.SIGKILL)


def homes(path: Path) -> dict[str, int]:
    """Episode -> its process outside."""
    return {str(pid.parent.relative_to(path)): int(pid.read_text()) for pid in path.glob("*/*/pid")}


def plant(home: Path) -> int:
    """What an attempt that is over had left."""
    home.mkdir(parents=True)
    (home / "pid").write_text(str(pid := sleeper()))
    return pid


async def test_handles_go_on_lost_ones_begin_again_and_leftovers_are_destroyed(fast_path: Path) -> None:
    twins = await whole("container", fast_path / "whole")
    assert not homes(fast_path / "whole" / "outside")
    path, outside = fast_path / "journal.sqlite", fast_path / "outside"
    killed("container", path)
    with STORIES["container"].run(path) as run:
        run_id = run.journal.run_id
        before = homes(outside)
        assert sorted(before) == [f"{run_id}/1.{n}.0" for n in range(3)]
        assert all(map(alive, before.values()))
        os.kill(before[f"{run_id}/1.1.0"], signal.SIGKILL)  # the second one dies outside
        shutil.rmtree(outside / run_id / "1.2.0")  # the third one's directory is gone, and its process is nobody's
        leftover, foreign = plant(outside / run_id / "1.0.7"), plant(outside / "another" / "1.0.7")
        resumed = await play_to_the_end(run)
        assert run.collector.progress().restarts == 2
    assert [t.id for t in resumed] == ["1.0.0", "1.1.1", "1.2.1"]
    assert view(resumed[0]) == twins[0]
    assert [t.reward for t in resumed] == [2.0, 2.0, 2.0]
    await until(lambda: not alive(leftover))
    assert list(homes(outside)) == ["another/1.0.7"]
    assert alive(foreign)
    os.kill(before[f"{run_id}/1.2.0"], signal.SIGKILL)


async def test_a_cut_leaves_what_a_handle_leads_to(fast_path: Path) -> None:
    """Ctrl-C costs no more than a kill: the next start goes on with the same containers."""
    path, outside = fast_path / "journal.sqlite", fast_path / "outside"
    with STORIES["container"].run(path, delay=0.003) as run:
        await run.collector.start(0)
        await all_in_the_second_turn(run)
        await run.collector.stop()
    before = homes(outside)
    assert len(before) == 3
    with STORIES["container"].run(path) as run:
        resumed = await play_to_the_end(run)
        assert run.collector.progress().restarts == 0
    assert [(t.id, t.reward) for t in resumed] == [("1.0.0", 2.0), ("1.1.0", 2.0), ("1.2.0", 2.0)]
    assert not homes(outside)
    await until(lambda: not any(map(alive, before.values())))  # a kill takes a moment to arrive


async def test_parallel_calls_that_a_kill_cut_are_reused_interrupted_and_run(fast_path: Path) -> None:
    """The first has its result, the second is interrupted, the third had not begun; none runs twice."""
    path = fast_path / "journal.sqlite"
    killed("errands", path)
    begun = (fast_path / "outside" / "errands").read_text().split()
    with STORIES["errands"].run(path) as run:
        resumed = await play_to_the_end(run)
    outcomes = {t.id: [(m["outcome"], m["content"][:11]) for m in t.messages if m["role"] == "tool"] for t in resumed}
    done, cut = ("ok", "errand {}"), ("interrupted", "Interrupted")
    assert sum(results.count(cut) for results in outcomes.values()) == 1
    for results in outcomes.values():
        assert [pair for pair in results if pair != cut] == [
            (done[0], done[1].format(n)) for n in range(3) if results[n] != cut
        ]
    calls = Counter((fast_path / "outside" / "errands").read_text().split())
    assert set(calls.values()) == {1}
    assert len(begun) < len(calls) == 9


async def test_a_cut_after_a_tools_deadline_leaves_what_the_handle_leads_to_as_well(fast_path: Path) -> None:
    """The instance that took the place of the stuck one lets go of it, too, without closing it."""
    go = threading.Event()

    class Stuck(Container):
        @tool(timeout=0.01)
        def put(self, thing: str) -> str:
            """Put something in, in vain."""
            go.wait()
            return thing

    Stuck.folder = fast_path / "outside"
    run = STORIES["container"].run(fast_path / "journal.sqlite", delay=0.003)
    run.env = Stuck
    with run:
        await run.collector.start(0)
        await all_in_the_second_turn(run)
        await run.collector.stop()
        assert run.ledger.status().slots == {"running": 3}
    assert len(homes(fast_path / "outside")) == 3
    go.set()
