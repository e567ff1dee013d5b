"""The clock of the wall limit: it stands still while the engine is paused, and its alarms with it."""

from __future__ import annotations

import asyncio

from gspo_agent.clock import Clock
from gspo_agent.config import Limits
from gspo_agent.env import ToolEnv
from gspo_agent.rollout.episode import run_episode
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import Status, Trajectory
from tests.rollout.scene import CHAT, Shop, shopper, until


class Hand:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


async def test_it_stands_still_while_it_is_stopped_and_stopping_twice_changes_nothing() -> None:
    hand = Hand()
    clock = Clock(hand)
    before = clock.now()
    hand.seconds += 2
    clock.stop()
    hand.seconds += 50
    clock.stop()
    assert clock.now() - before == 2
    clock.go()
    clock.go()
    hand.seconds += 3
    assert clock.now() - before == 5


async def test_an_alarm_rings_after_its_seconds_of_this_clock_and_not_while_it_stands() -> None:
    hand, rung = Hand(), []
    clock = Clock(hand)
    clock.alarm(0.0, lambda: rung.append("at once"))
    clock.alarm(0.001, lambda: rung.append("later"))
    clock.alarm(0.001, lambda: rung.append("never")).cancel()
    clock.stop()
    clock.alarm(0.0, lambda: rung.append("begun while it stood"))
    await asyncio.sleep(0.02)
    assert rung == ["at once"]
    clock.go()
    await asyncio.sleep(0.02)
    assert rung == ["at once", "begun while it stood"]
    hand.seconds += 1
    await until(lambda: "later" in rung)
    assert rung == ["at once", "begun while it stood", "later"]


async def test_an_episode_that_waits_for_a_paused_engine_does_not_grow_older() -> None:
    """An hour in a paused engine costs nothing of a wall limit of a minute; two minutes of sampling end the episode."""
    hand, engine, limits = Hand(), ScriptedEngine(shopper), Limits(wall=60.0)
    for paused in (True, False):
        clock, trajectory = Clock(hand), Trajectory(1, 0, 0, seed=5)
        engine.hold_at = 330
        playing = asyncio.create_task(
            run_episode(
                trajectory, env=Shop(), chat=CHAT, engine=engine, task={"a": 1, "b": 2}, limits=limits, clock=clock
            )
        )
        await until(lambda: engine.held)
        if paused:
            clock.stop()
        hand.seconds += 3600 if paused else 120
        clock.go()
        engine.hold_at = None
        await playing
        assert trajectory.stop_reason == ("terminated" if paused else "wall")


async def test_a_tool_grows_older_while_the_engine_is_paused() -> None:
    class Slow(ToolEnv):
        def prompt(self, task: dict[str, int]) -> str:
            return "go"

        def tools(self) -> list[object]:
            async def add(number: int) -> str:
                """Adds."""
                await asyncio.sleep(3600)
                return ""

            return [add]

        def score(self, task: dict[str, int], answer: str) -> float:
            return 0.5

    clock, trajectory = Clock(), Trajectory(1, 0, 0, seed=5)
    engine = ScriptedEngine(shopper)
    playing = asyncio.create_task(
        run_episode(
            trajectory, env=Slow(), chat=CHAT, engine=engine, task={}, limits=Limits(wall=0.3), renew=Slow, clock=clock
        )
    )
    await until(lambda: engine.requests)
    clock.stop()
    await playing
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, "wall")
