"""Who runs an episode is told when all parts of it wait for others, and when one goes on."""

from __future__ import annotations

import asyncio

from gspo_agent.env.threads import run_sync
from gspo_agent.waiting import aside, part, told


async def test_only_a_wait_of_all_parts_is_told() -> None:
    seen: list[str] = []
    go = [asyncio.Event() for _ in range(2)]

    async def waits(number: int) -> None:
        with part(), aside("quota"):
            await go[number].wait()

    async def works() -> None:
        with part():
            await go[1].wait()

    with told(seen.append, lambda: seen.append("on")):
        with aside("judges"):
            pass
        assert seen == ["judges", "on"]
        seen.clear()
        tasks = [asyncio.ensure_future(one) for one in (waits(0), works())]
        with aside(""):
            await asyncio.sleep(0)
            go[0].set()
            await tasks[0]
            assert seen == ["", "on", "quota", "on"]
            go[1].set()
            await asyncio.gather(*tasks)
    assert seen[-1] == "on"


async def test_code_that_no_episode_runs_or_another_event_loop_tells_nobody() -> None:
    with aside("quota"), part():
        pass
    seen: list[str] = []

    async def elsewhere() -> None:
        with aside("quota"):
            pass

    with told(seen.append, lambda: seen.append("on")):
        await asyncio.to_thread(lambda: run_sync(elsewhere()))
    assert seen == []
