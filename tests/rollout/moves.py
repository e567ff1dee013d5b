"""Moves of a ledger for tests: groups are created, played and trained without an engine or an environment."""

from __future__ import annotations

from concurrent.futures import Future

from gspo_agent.rollout.events import Begun, Ended, Observed, Sampled
from gspo_agent.rollout.ledger import Ledger, NewGroup, OpenGroup, Settled, Slot
from gspo_agent.trajectory import Segment, Status, weight_version


def new_group(cursor: int, *, size: int = 2, source: int = 0, max_attempts: int = 2) -> NewGroup:
    return NewGroup(source, cursor, "shop", {"n": cursor}, size, max_attempts, min_group=2, seed=7)


async def create(ledger: Ledger, new: NewGroup) -> OpenGroup:
    (group,) = await ledger.create_groups([new])
    return group


def begin(ledger: Ledger, slot: Slot) -> None:
    begun: Future[None] = Future()
    ledger.begin(slot, Begun(slot.seed, "shop", slot.attempt, ledger._journal.life), begun)
    begun.result(5)


def sample(ledger: Ledger, slot: Slot, *steps: int, offset: int = 0) -> None:
    """Three tokens at each step's weights."""
    for n, step in enumerate(steps):
        segment = Segment([1, 2, 3], "policy", [-1.0] * 3, weight_version(ledger._journal.life, step))
        ledger._journal.append(slot.id, Sampled(0, offset + 3 * n, [segment], "r", None))


def end(ledger: Ledger, slot: Slot, reward: float | None, reason: str = "because") -> Settled:
    """Ends a slot; None fails it."""
    status = Status.FAILED if reward is None else Status.TERMINATED
    settled: Future[Settled] = Future()
    versions = ledger.episode(slot).trajectory.sampled_by_step()
    ledger.end(slot, Ended(status, reason, reward), reward or 0.0, versions, settled)
    return settled.result(5)


async def finish(ledger: Ledger, group: OpenGroup, *rewards: float) -> None:
    for slot, reward in zip(group.slots, rewards, strict=True):
        begin(ledger, slot)
        end(ledger, slot, reward)


async def play(ledger: Ledger, group: OpenGroup, *rewards: float, tokens: int = 1) -> None:
    """As `finish`, with a prompt and some tokens."""
    for slot, reward in zip(group.slots, rewards, strict=True):
        begin(ledger, slot)
        ledger._journal.append(slot.id, Observed(0, [{"role": "user", "content": "hi"}], [7, 8], tools=[]))
        sample(ledger, slot, *[0] * tokens, offset=2)
        end(ledger, slot, reward)


async def train(ledger: Ledger, *steps: int, filtered: bool = False) -> None:
    """Each of these steps: one group of two (and one without variance), played, trained, covered by a checkpoint."""
    for step in steps:
        if filtered:
            await play(ledger, await create(ledger, new_group(ledger.cursors().get(0, 0))), 1.0, 1.0)
        await play(ledger, await create(ledger, new_group(ledger.cursors().get(0, 0))), 0.0, 1.0)
        lease = await ledger.lease(step, 1, max_filtered=1, max_weight_lag=8)
        assert lease is not None
        await ledger.commit_step(step, lease, (f"step-{step}", "hash"))
