"""A quota gives turns in order, at its rate, to as many at once as it says, and costs next to nothing to wait for."""

from __future__ import annotations

import asyncio

import pytest

from gspo_agent.quota import Quota


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Callers:
    """Enter in the order of their numbers, and leave when they are told to."""

    def __init__(self, quota: Quota, number: int) -> None:
        self.quota, self.inside = quota, list[int]()
        self.leave = [asyncio.Event() for _ in range(number)]
        self.tasks = [asyncio.ensure_future(self.one(n)) for n in range(number)]

    async def one(self, number: int) -> None:
        async with self.quota:
            self.inside.append(number)
            try:
                await self.leave[number].wait()
            finally:
                self.inside.remove(number)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_callers_enter_in_order_and_no_more_at_once_than_the_concurrency() -> None:
    callers = Callers(Quota(concurrency=2), 5)
    await settle()
    assert (callers.inside, callers.quota.waiting) == ([0, 1], 3)
    for leaving, inside in ((1, [0, 2]), (0, [2, 3]), (2, [3, 4]), (3, [4]), (4, [])):
        callers.leave[leaving].set()
        await settle()
        assert callers.inside == inside


async def test_a_rate_lets_so_many_enter_in_a_period_and_the_others_wait() -> None:
    callers = Callers(Quota(rate=3, period=3600), 5)
    await settle()
    assert (callers.inside, callers.quota.waiting) == ([0, 1, 2], 2)
    callers.leave[0].set()
    await settle()
    assert callers.inside == [1, 2]  # a place does not make a rate
    await callers.end()
    callers = Callers(Quota(rate=3, period=0.02), 7)
    async with asyncio.timeout(20):
        while len(callers.inside) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert callers.inside == list(range(7))
    await callers.end()


@pytest.mark.parametrize(("rate", "whole", "span"), [(0.5, 1, 20.0), (2.5, 2, 8.0), (4, 4, 10.0)])
def test_a_fractional_rate_is_kept_exactly_over_a_longer_span(rate: float, whole: int, span: float) -> None:
    throttler = Quota(rate=rate, period=10.0)._throttler
    assert throttler is not None
    assert (throttler.rate_limit, throttler.period) == (whole, pytest.approx(span))


async def test_who_is_cancelled_leaves_the_queue_and_takes_no_turn_along() -> None:
    callers = Callers(Quota(concurrency=1), 4)
    await settle()
    callers.tasks[1].cancel()
    await settle()
    assert callers.quota.waiting == 2
    callers.leave[0].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    callers.tasks[2].cancel()  # perhaps with the turn in hand, perhaps before: the next one gets it in any case
    await settle()
    assert callers.inside == [3]
    callers.tasks[3].cancel()
    await settle()
    async with callers.quota:
        assert callers.quota.waiting == 0


@pytest.mark.parametrize("hops", range(6))
async def test_a_turn_is_never_lost_whenever_its_caller_is_cancelled(hops: int) -> None:
    callers = Callers(Quota(concurrency=1), 3)
    await settle()
    callers.leave[0].set()
    for _ in range(hops):
        await asyncio.sleep(0)
    callers.tasks[1].cancel()
    await settle()
    assert callers.inside == [2]
    await callers.end()


async def test_one_task_asks_the_throttler_for_all_who_wait_and_ends_when_nobody_does() -> None:
    quota = Quota(rate=1, period=3600)
    others = len(asyncio.all_tasks())
    callers = Callers(quota, 2048)
    await settle()
    assert (quota.waiting, len(asyncio.all_tasks()) - others) == (2047, 2048 + 1)
    await callers.end()
    await settle()
    assert len(asyncio.all_tasks()) == others


def test_it_serves_one_event_loop_after_another_and_the_rate_holds_across_them() -> None:
    quota = Quota(rate=3, period=3600, concurrency=2)

    async def hold() -> None:
        callers = Callers(quota, 4)
        await settle()
        assert callers.inside == [0, 1]

    async def use() -> None:
        callers = Callers(quota, 2)
        await settle()
        assert (callers.inside, quota.waiting) == ([0], 1)  # the third turn of this hour

    asyncio.run(hold())  # its callers are inside and in the queue when it ends
    asyncio.run(use())


def test_what_is_no_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the quota of 'search': rate = 0 is not positive"):
        Quota(rate=0, name="the quota of 'search'")
