"""What an event loop needs beside it: threads for blocking work, and a garbage collector that seldom comes by."""

from __future__ import annotations

import asyncio
import gc
import threading

from gspo_agent.background import Crew, rare_collections


def test_collections_are_rare_within_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_only_refers_to_itself_still_goes() -> None:
    class Cycle:
        living = 0

        def __init__(self) -> None:
            self.self, self.text = self, "x" * 1000
            Cycle.living += 1

        def __del__(self) -> None:
            Cycle.living -= 1

    with rare_collections():
        for _ in range(100_000):
            Cycle()
        assert Cycle.living <= 10_000


async def test_a_crew_does_one_job_after_another_in_few_threads_and_tells_what_they_raise() -> None:
    crew, seen = Crew(2, "crew of a test"), []

    def work(number: int) -> int:
        seen.append(threading.current_thread().name)
        if number == 3:
            raise ValueError("three")
        return number

    done = await asyncio.gather(*(crew.run(work, number) for number in range(20)), return_exceptions=True)
    assert [result for result in done if not isinstance(result, ValueError)] == [n for n in range(20) if n != 3]
    assert str(done[3]) == "three"
    assert set(seen) == {"crew of a test"}

    go = threading.Event()
    cut = asyncio.ensure_future(crew.run(go.wait))
    await asyncio.sleep(0)
    cut.cancel()
    go.set()
    assert await crew.run(work, 1) == 1  # whoever is cut is waited for by nobody, and the crew goes on
    assert sum(thread.name == "crew of a test" for thread in threading.enumerate()) <= 2
    crew.end()
    for thread in [thread for thread in threading.enumerate() if thread.name == "crew of a test"]:
        thread.join(10)
        assert not thread.is_alive()
