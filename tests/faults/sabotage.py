"""Guarantees broken on purpose: a campaign that finds nothing where one of these is at work has no eyes.

Each is done to a victim in its own process, by the name that `--sabotage` takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gspo_agent import trainer
from gspo_agent.rollout import lock, recall
from gspo_agent.rollout.events import Sampled
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.rollout.recorder import JournalCallLog, JournalRecorder
from tests.faults.engines import Scripted
from tests.faults.world import Till


def repeat_calls() -> None:
    """A call that an earlier life began runs again, whatever it is."""
    run: Any = JournalCallLog.run

    async def again(self: Any, call_id: str, function: Any, meta: Any) -> Any:
        self._recorder.episode.calls.pop(call_id, None)
        return await run(self, call_id, function, meta)

    _put(JournalCallLog, "run", again)


def forget_tokens() -> None:
    """What was sampled last before a kill is not read back."""
    read: Any = recall.read_events

    def forgetful(*args: Any) -> Any:
        events = read(*args)
        return events[:-1] if events and isinstance(events[-1], Sampled) else events

    _put(recall, "read_events", forgetful)


def unbounded_requests() -> None:
    """A request samples the whole turn before a token of it is journaled."""

    async def room(self: Any, tokens: int) -> int:
        return 100_000

    _put(JournalRecorder, "room", room)


def early_acknowledgement() -> None:
    """A call's intent is called durable before it is written."""

    async def durable(self: Any, *events: Any) -> None:
        self.record(*events)

    _put(JournalRecorder, "durable", durable)


def lose_tasks() -> None:
    """One group in five is played and forgotten."""
    create: Any = Ledger.create_groups

    async def lossy(self: Any, new: Any) -> Any:
        groups = await create(self, new)
        lost = [(group.id,) for group in groups if group.id % 5 == 0]
        await self._journal.transact(lambda c: c.executemany("UPDATE groups SET cursor = 0 WHERE id = ?", lost))
        return groups

    _put(Ledger, "create_groups", lossy)


def abandon_groups() -> None:
    """A restart goes on with all unfinished groups but the first."""
    unfinished: Any = Ledger.unfinished
    _put(Ledger, "unfinished", lambda self: unfinished(self)[1:])


def train_again() -> None:
    """A group of a committed step is ready once more."""
    commit: Any = Ledger.commit_step

    async def commit_step(self: Any, step: int, lease: Any, *args: Any, **how: Any) -> None:
        await commit(self, step, lease, *args, **how)
        group = lease.groups[0].id
        await self._journal.transact(lambda c: c.execute("DELETE FROM leases WHERE group_id = ?", (group,)))
        await self._journal.transact(
            lambda c: c.execute("UPDATE groups SET state = 'ready', settled = NULL WHERE id = ?", (group,))
        )

    _put(Ledger, "commit_step", commit_step)


def reuse_versions() -> None:
    """Weight versions do not tell lives apart."""
    version: Any = trainer.weight_version
    _put(trainer, "weight_version", lambda life, step: version(1, step))


def spoil_state() -> None:
    """An environment comes back a little different."""
    load: Any = Till.set_state

    def set_state(self: Any, state: Any) -> None:
        load(self, state)
        self.total += 1

    _put(Till, "set_state", set_state)


def base_weights() -> None:
    """An engine that restarted takes traffic before it has the current weights."""

    async def restart(self: Any, seconds: float) -> None:
        self._restarts += 1
        self._aborted |= self._live
        self.weight_version = 0
        await asyncio.sleep(0)

    _put(Scripted, "restart", restart)


def open_door() -> None:
    """A second process is let in."""
    _put(lock.fcntl, "lockf", lambda *args: None)


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


SABOTAGES: dict[str, tuple[Callable[[], None], str]] = {
    "repeat_calls": (repeat_calls, "kill -9 of the trainer"),
    "forget_tokens": (forget_tokens, "kill -9 of the trainer"),
    "unbounded_requests": (unbounded_requests, "kill -9 of the trainer"),
    "early_acknowledgement": (early_acknowledgement, "kill -9 of the trainer"),
    "lose_tasks": (lose_tasks, "kill -9 of the trainer"),
    "abandon_groups": (abandon_groups, "kill -9 of the trainer"),
    "train_again": (train_again, "kill -9 of the trainer"),
    "reuse_versions": (reuse_versions, "kill -9 of the trainer"),
    "spoil_state": (spoil_state, "kill -9 of the trainer"),
    "base_weights": (base_weights, "engine restart"),
    "open_door": (open_door, "second process"),
}
"""Name -> what is broken, and the kind of fault that should find it."""
