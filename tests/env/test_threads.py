from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from gspo_agent.env import threads
from gspo_agent.env.threads import DeadlinePassed, Lane, run_sync


async def test_calls_of_one_lane_share_a_thread_and_keep_their_order() -> None:
    lane, seen = Lane(), []
    await asyncio.gather(*(lane.run(seen.append, i) for i in range(20)))
    assert seen == list(range(20))
    assert await lane.run(threading.get_ident) == await lane.run(threading.get_ident) != threading.get_ident()


async def test_lanes_run_beside_each_other_however_many_there_are() -> None:
    barrier = threading.Barrier(40, timeout=20)
    await asyncio.gather(*(Lane().run(barrier.wait) for _ in range(40)))


async def test_a_released_thread_serves_the_next_lane() -> None:
    first, second = Lane(), Lane()
    ident = await first.run(threading.get_ident)
    first.release()
    assert await second.run(threading.get_ident) == ident


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration(), TimeoutError("its own")])
async def test_what_a_call_raises_reaches_the_caller(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
        await Lane().run(fail)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_leaving_python_in_a_hook_does_not_leave_the_loop(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind("bye")

    with pytest.raises(RuntimeError, match=kind.__name__):
        await Lane().run(leave)


async def test_a_deadline_ends_the_waiting_and_marks_the_lane() -> None:
    lane, go = Lane(), threading.Event()
    with pytest.raises(DeadlinePassed):
        await lane.run(go.wait, 20, timeout=0.01)
    assert lane.stuck
    go.set()


async def test_a_stuck_thread_is_never_handed_on() -> None:
    lane, go = Lane(), threading.Event()
    with pytest.raises(DeadlinePassed):
        await lane.run(go.wait, 20, timeout=0.01)
    lane.release()
    assert await Lane().run(lambda: "free", timeout=5) == "free"
    go.set()


async def test_cancelling_marks_the_lane_because_the_call_goes_on() -> None:
    lane, go = Lane(), threading.Event()
    task = asyncio.ensure_future(lane.run(go.wait, 20))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lane.stuck
    go.set()


async def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Big: ...

    big = Big()
    gone = weakref.ref(big)
    lane = Lane()
    await lane.run(lambda it: None, big)
    await lane.run(lambda: None)  # the thread has let go of the first call once it serves the second
    del big
    gc.collect()
    assert gone() is None


def test_asynchronous_code_runs_for_a_synchronous_caller_even_inside_a_running_loop() -> None:
    async def inner() -> str:
        await asyncio.sleep(0)
        return "done"

    async def outer() -> str:
        return run_sync(inner())

    assert run_sync(inner()) == "done"
    assert asyncio.run(outer()) == "done"


def test_a_lane_that_waits_for_a_coroutine_serves_what_the_coroutine_needs() -> None:
    lane = Lane()

    async def needs_the_lane() -> int:
        return await lane.run(threading.get_ident)

    async def main() -> tuple[int, int]:
        return await lane.run(lambda: (threading.get_ident(), run_sync(needs_the_lane())))

    mine, nested = asyncio.run(main())
    assert mine == nested


def test_waiting_inside_the_shared_loop_is_an_error_and_no_deadlock() -> None:
    async def inner() -> None: ...

    async def outer() -> None:
        run_sync(inner())

    with pytest.raises(RuntimeError, match="await the a-method"):
        run_sync(outer())


def test_nothing_is_left_of_threads_after_a_fork() -> None:
    run_sync(asyncio.sleep(0))
    kept = threads._bridge_loop, threads._bridge_lock, list(threads._idle)
    try:
        threads._forget_threads()
        assert run_sync(asyncio.sleep(0, "new loop")) == "new loop"
    finally:
        threads._bridge_loop, threads._bridge_lock = kept[0], kept[1]
        threads._idle.extend(kept[2])
