"""The collector without its journal: the same loop, and recorders and a ledger that keep everything in memory only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_agent.env import Env
from gspo_agent.rollout.attempt import Attempts
from gspo_agent.rollout.collector import Collector
from gspo_agent.rollout.events import Ended, Event
from gspo_agent.rollout.groups import NewGroup, OpenGroup, Ready, Settled, Slot, slot_seed
from gspo_agent.rollout.leases import Lease
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.rollout.recorder import JournalRecorder, Recorder
from gspo_agent.rollout.state import Same, State
from gspo_agent.trajectory import Group, Trajectory


class UnwrittenLedger(Ledger):
    """Groups whose every member plays to its end; what the collector asks for at its start is an empty journal's."""

    def __init__(self, journal: Any) -> None:
        super().__init__(journal)
        self._tasks: dict[int, Mapping[str, Any]] = {}
        self._left: dict[int, int] = {}

    async def create_groups(self, new: Sequence[NewGroup]) -> list[OpenGroup]:
        return [self._create(group) for group in new]

    def _create(self, new: NewGroup) -> OpenGroup:
        number = len(self._tasks) + 1
        self._tasks[number], self._left[number] = new.task, new.size
        slots = [
            Slot(number * new.size + n, number, n, 0, slot_seed(new.seed, number, n, 0), running=False)
            for n in range(new.size)
        ]  # fmt: skip
        return OpenGroup(number, new.source, new.spec, new.task, slots)

    def end(self, slot: Slot, event: Ended, reward: float, versions: Mapping[int, int], told: Any) -> None:
        self._left[slot.group_id] -= 1
        over = not self._left[slot.group_id]
        told.set_result(Settled(None, "ready", Ready(slot.group_id, False)) if over else Settled(None, "open", None))

    async def lease(
        self,
        step: int,
        num_groups: int,
        *,
        finished: Mapping[int, Sequence[Trajectory]] | None = None,
        **how: Any,
    ) -> Lease:
        assert finished is not None
        groups = [Group(number, self._tasks[number], finished[number]) for number in list(finished)[:num_groups]]
        return Lease(step, groups, [], None, 0)


class UnwrittenRecorder(JournalRecorder):
    """Applies events and asks for no state of the environment."""

    def record(self, *events: Event) -> None:
        Recorder.record(self, *events)
        if isinstance(events[-1], Ended):
            self._end(events[-1], events[-1:])

    async def durable(self, *events: Event) -> None:
        Recorder.record(self, *events)

    async def room(self, tokens: int) -> int:
        return tokens

    def hold(self, event: Event, env: Env | None = None) -> None:
        Recorder.record(self, event)

    def write_held(self) -> None: ...

    async def snapshot(self, env: Env) -> State | Same | None:
        return None


class UnwrittenAttempts(Attempts):
    """Plays with recorders that write nothing."""

    async def _recorder(self, group: OpenGroup, slot: Slot) -> JournalRecorder:
        return UnwrittenRecorder(self._journal, self._ledger, slot)


class UnwrittenCollector(Collector):
    """Never looks at its journal."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._attempts = UnwrittenAttempts(
            parts["journal"], parts["ledger"], parts["chat"], parts["engine"], parts["config"], self._clock
        )
