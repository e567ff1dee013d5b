"""The ledger: nothing lost, nothing trained twice, whatever the order of ends, failures, expiries, leases, commits,
rollbacks, retirements and kills."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gspo_agent.rollout import retention
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Lease, Ledger, Slot
from gspo_agent.rollout.retention import retire
from tests.rollout.moves import begin, create, end, new_group, sample

MIN_GROUP = 2
rewards = st.sampled_from([None, 0.0, 1.0, 1.0 + 1e-9])


@dataclass
class Attempt:
    """What the model knows of a slot."""

    state: str = "waiting"
    steps: list[int] = field(default_factory=list)
    """Steps of the weights that sampled its tokens."""


@dataclass
class Member:
    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])

    @property
    def tried(self) -> int:
        return sum(attempt.state in ("failed", "expired") for attempt in self.attempts)

    @property
    def scored(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.state == "done"), None)


@dataclass
class Modelled:
    """What the model knows of a group."""

    max_attempts: int
    members: list[Member]
    state: str = "open"
    settled: int | None = None

    def too_old(self, step: int, lag: int) -> list[Member]:
        """Members that would be played again."""
        return [
            member
            for member in self.members
            if member.scored is not None
            and member.tried + 1 < self.max_attempts
            and any(step - of > lag for of in member.scored.steps)
        ]


class LedgerMachine(RuleBasedStateMachine):
    """Random histories of a run, beside a model of it that knows no SQL."""

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None)
        self.chunk, retention._CHUNK = retention._CHUNK, 1  # a transaction an attempt: more places for a kill
        self.lives = 1
        self.path = Path(self.directory.name) / "1" / "journal.sqlite"
        self.episodes = Path(self.directory.name) / "episodes"
        self.loop = asyncio.new_event_loop()
        self.journal = Journal.open(self.path)
        self.ledger = Ledger(self.journal)
        self.groups: dict[int, Modelled] = {}
        self.step = self.covered = self.oldest = 0
        self.checkpoints: list[int] = []
        self.trained: dict[int, list[int]] = {}
        """Step -> groups it trained on, of the surviving lineage."""
        self.leased: dict[int, tuple[list[int], list[int]]] = {}
        """Step -> (groups, filtered) as first leased."""
        self.marked = 0
        """The last step that has begun to leave."""
        self.lease: Lease | None = None

    def slots(self) -> list[Slot]:
        return [slot for group in self.ledger.unfinished() for slot in group.slots]

    def attempt(self, slot: Slot) -> Attempt:
        return self.groups[slot.group_id].members[slot.number].attempts[slot.attempt]

    @rule(size=st.integers(2, 3), max_attempts=st.integers(1, 3))
    def create(self, size: int, max_attempts: int) -> None:
        new = new_group(len(self.groups), size=size, max_attempts=max_attempts)
        group = self.loop.run_until_complete(create(self.ledger, new))
        assert group.id == len(self.groups) + 1
        self.groups[group.id] = Modelled(max_attempts, [Member() for _ in range(size)])

    @rule(pick=st.integers(0, 100), age=st.integers(0, 5))
    def sample_some(self, pick: int, age: int) -> None:
        """Begins an attempt, or goes on with one."""
        if slots := self.slots():
            self._sample(slots[pick % len(slots)], age)

    def _sample(self, slot: Slot, age: int) -> None:
        attempt = self.attempt(slot)
        if not slot.running:
            begin(self.ledger, slot)
            attempt.state = "running"
        sample(self.ledger, slot, max(0, self.step - age), offset=3 * len(attempt.steps))
        attempt.steps.append(max(0, self.step - age))

    @rule(pick=st.integers(0, 100), reward=rewards, age=st.integers(0, 5))
    def play(self, pick: int, reward: float | None, age: int) -> None:
        if slots := self.slots():
            self._play(slots[pick % len(slots)], reward, age)

    @rule(reward=rewards, age=st.integers(0, 5))
    def play_all(self, reward: float | None, age: int) -> None:
        for slot in self.slots():
            self._play(slot, reward if slot.number else 0.5, age)

    def _play(self, slot: Slot, reward: float | None, age: int) -> None:
        self._sample(slot, age)
        settled = end(self.ledger, slot, reward)
        group = self.groups[slot.group_id]
        member = group.members[slot.number]
        self.attempt(slot).state = "done" if reward is not None else "failed"
        if reward is None and member.tried < group.max_attempts:
            assert settled.retry is not None
            assert (settled.retry.number, settled.retry.attempt) == (slot.number, slot.attempt + 1)
            member.attempts.append(Attempt())
        else:
            assert settled.retry is None
            if reward is None and (expired := [a for a in member.attempts if a.state == "expired"]):
                expired[-1].state = "done"
        if all(m.attempts[-1].state not in ("waiting", "running") for m in group.members):
            scored = sum(member.scored is not None for member in group.members)
            group.state = "ready" if scored >= MIN_GROUP else "given_up"
            group.settled = None if group.state == "ready" else self.step + 1
        assert settled.group_state == group.state

    @rule(pick=st.integers(0, 100))
    def begin_again(self, pick: int) -> None:
        running = [slot for slot in self.slots() if slot.running]
        if running:
            slot = running[pick % len(running)]
            settled = self.ledger.restart(slot, "no state").result(5)
            assert settled.retry is not None
            self.attempt(slot).state = "restarted"
            self.groups[slot.group_id].members[slot.number].attempts.append(Attempt())

    @rule(lag=st.integers(1, 4))
    def expire(self, lag: int) -> None:
        step = self.step + 1
        opened = self.loop.run_until_complete(self.ledger.expire(step, lag))
        expected = {n: g for n, g in self.groups.items() if g.state == "ready" and g.too_old(step, lag)}
        assert [group.id for group in opened] == sorted(expected)
        for group in opened:
            members = expected[group.id].too_old(step, lag)
            expected[group.id].state = "open"
            for member in members:
                assert member.scored is not None
                member.scored.state = "expired"
                member.attempts.append(Attempt())
            waiting = [(n, len(m.attempts) - 1) for n, m in enumerate(expected[group.id].members) if m in members]
            assert [(slot.number, slot.attempt) for slot in group.slots] == waiting

    @rule(num_groups=st.integers(1, 3), max_filtered=st.integers(0, 2))
    def take(self, num_groups: int, max_filtered: int) -> None:
        step = self.step + 1
        lease = self.loop.run_until_complete(
            self.ledger.lease(step, num_groups, max_filtered=max_filtered, max_weight_lag=3)
        )
        if lease is None:
            assert step not in self.leased
            return
        ids = ([group.id for group in lease.groups], [group.id for group in lease.filtered])
        assert self.leased.setdefault(step, ids) == ids
        for group in (*lease.groups, *lease.filtered):
            self.groups[group.id].state = "leased"
            scored = [n for n, member in enumerate(self.groups[group.id].members) if member.scored is not None]
            assert [trajectory.index for trajectory in group.trajectories] == scored
        self.lease = lease

    @precondition(lambda self: self.lease is not None)
    @rule(checkpoint=st.booleans())
    def commit(self, checkpoint: bool) -> None:
        assert self.lease is not None
        self.step += 1
        name = (f"step-{self.step}", "hash") if checkpoint else None
        self.loop.run_until_complete(self.ledger.commit_step(self.step, self.lease, name, {"loss": 1.0}))
        self.trained[self.step] = [group.id for group in self.lease.groups]
        self.lease = None
        if checkpoint:
            self.covered = self.step
            self.checkpoints.append(self.step)
            for step in range(1, self.step + 1):
                for state, ids in zip(("consumed", "filtered"), self.leased[step], strict=True):
                    for group in ids:
                        self.groups[group].state, self.groups[group].settled = state, step

    @rule(checkpoint=st.booleans(), max_attempts=st.integers(1, 3), age=st.integers(0, 5))
    def train_a_step(self, checkpoint: bool, max_attempts: int, age: int) -> None:
        """What most of a run's life is."""
        self.create(2, max_attempts)
        self.play_all(1.0, age)
        self.take(1, 1)
        if self.lease is not None:
            self.commit(checkpoint)

    @rule(age=st.integers(2, 5), max_attempts=st.integers(2, 3), fails=st.integers(0, 2))
    def grow_old(self, age: int, max_attempts: int, fails: int) -> None:
        """A group gets too old while it waits, and is played again, with less luck."""
        self.create(2, max_attempts)
        self.play_all(1.0, age)
        self.expire(1)
        for _ in range(fails):
            self.play_all(None, 0)

    @rule(steps=st.integers(1, 2), keep=st.integers(0, 1), oldest=st.integers(0, 2), stop_after=st.integers(2, 12))
    def retire_some(self, steps: int, keep: int, oldest: int, stop_after: int) -> None:
        """Steps are trained, and the retirement after them is killed."""
        for _ in range(steps):
            self.train_a_step(True, 1, 0)
        self.retire(keep, oldest, stop_after)

    @precondition(lambda self: self.checkpoints)
    @rule(keep=st.integers(0, 1), oldest=st.integers(0, 2), stop_after=st.none())
    def retire(self, keep: int, oldest: int, stop_after: int | None) -> None:
        """Old checkpoints go, and what only they needed goes after them; or some of it, before a kill."""
        self.checkpoints = self.checkpoints[oldest % len(self.checkpoints) :]
        until = min(self.covered - keep, self.checkpoints[0])
        left = stop_after if stop_after is not None else 1_000_000
        transact = self.journal.transact

        async def spend(*arguments: object, **how: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise InterruptedError
            return await transact(*arguments, **how)  # type: ignore[arg-type]

        self.journal.transact = spend  # type: ignore[method-assign,assignment]
        try:
            work = retire(self.journal, oldest_checkpoint=self.checkpoints[0], keep_steps=keep, export=self.episodes)
            gone = self.loop.run_until_complete(work)
            assert self.gone(until) <= self.gone_now(), gone
        except InterruptedError:
            pass
        finally:
            self.journal.transact = transact  # type: ignore[method-assign]
        self.marked, before = self.journal.submit(retention.retired_step).result(5), self.marked
        assert self.marked <= max(before, until)
        assert self.gone_now() <= self.gone(until) | self.gone(self.marked)

    def gone(self, until: int) -> set[int]:
        return {n for n, group in self.groups.items() if group.settled is not None and group.settled <= until}

    def gone_now(self) -> set[int]:
        here = self.journal.submit(lambda c: c.execute("SELECT id FROM groups").fetchall()).result(5)
        return set(self.groups) - {group for (group,) in here}

    @rule(steps=st.integers(1, 3), back=st.integers(0, 100), kill=st.booleans())
    def roll_back(self, steps: int, back: int, kill: bool) -> None:
        """Trains some steps, and finds an older checkpoint to be the newest that can be read."""
        for _ in range(steps):
            self.train_a_step(True, 1, 0)
        self.restart(back % len(self.checkpoints), kill)

    @rule(back=st.none() | st.integers(0, 100), kill=st.booleans())
    def restart(self, back: int | None, kill: bool) -> None:
        """Another life, on what a kill leaves of the files; perhaps its newest checkpoints cannot be read."""
        before = self.slots()
        self.lives += 1
        if kill:
            new = Path(self.directory.name) / str(self.lives)
            shutil.copytree(self.path.parent, new)
            self.path = new / "journal.sqlite"
        self.journal.close()
        self.journal = Journal.open(self.path)
        self.ledger = Ledger(self.journal)
        last = self.ledger.last_step()
        assert (last.step if last else 0) == self.covered
        assert self.slots() == before
        if back is not None and self.checkpoints:
            self.covered = self.checkpoints[back % len(self.checkpoints)]
            self.loop.run_until_complete(self.ledger.roll_back(self.covered))
            self.checkpoints = [step for step in self.checkpoints if step <= self.covered]
        for step in [step for step in self.leased if step > self.covered]:
            self.trained.pop(step, None)
            for group in (group for ids in self.leased[step] for group in ids):
                self.groups[group].state, self.groups[group].settled = "leased", None
        self.step, self.lease = self.covered, None
        assert self.ledger.pending_leases() == sorted(step for step in self.leased if step > self.covered)

    @invariant()
    def every_task_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        status = self.ledger.status()
        assert status.groups == Counter(group.state for group in self.groups.values())
        attempts = (a for group in self.groups.values() for member in group.members for a in member.attempts)
        assert status.slots == Counter(attempt.state for attempt in attempts)
        assert self.ledger.cursors().get(0, 0) == len(self.groups)
        trained = [group for groups in self.trained.values() for group in groups]
        assert len(trained) == len(set(trained))
        open_groups = {slot.group_id for slot in self.slots()}
        assert open_groups == {n for n, group in self.groups.items() if group.state == "open"}
        result = audit(self.path)
        assert (result.breaches, result.steps, result.tasks) == ((), self.step, len(self.groups))

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            try:
                self.to_the_end()
            finally:
                retention._CHUNK = self.chunk
                self.journal.close()
                self.loop.close()
                self.directory.cleanup()

    def to_the_end(self) -> None:
        """Every open slot is played, every group trained: each task was trained once, filtered, or given up."""
        self.create(2, 1)  # so that one more step gets a checkpoint
        while self.slots():
            self.play_all(1.0, 0)
        while True:
            self.take(1, 2)
            if self.lease is None:
                break
            self.commit(True)
        ends = Counter(group.state for group in self.groups.values())
        flat = ends.pop("ready", 0)  # what is left is filtered with the next group that has variance
        assert set(ends) <= {"consumed", "filtered", "given_up"}, ends
        assert flat <= 2
        trained = Counter(group for groups in self.trained.values() for group in groups)
        assert trained == Counter(n for n, group in self.groups.items() if group.state == "consumed")
        self.retire(0, len(self.checkpoints) - 1, None)
        self.every_task_is_in_exactly_one_place()
        rows = Counter((row["group_id"], row["index"], row["attempt"], row["outcome"]) for row in self.exported())
        assert rows == Counter(
            (n, number, attempt, self.groups[n].state if of.state == "done" else of.state)
            for n in self.gone_now()
            for number, member in enumerate(self.groups[n].members)
            for attempt, of in enumerate(member.attempts)
        )
        assert self.gone_now() == self.gone(self.covered)

    def exported(self) -> list[dict[str, object]]:
        import pyarrow.parquet as pq

        return [row for file in self.episodes.glob("*.parquet") for row in pq.read_table(file).to_pylist()]


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
