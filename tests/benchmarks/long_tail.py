"""Time per step when a few responses are much longer than the rest, for every way of scheduling them.

    python -m tests.benchmarks.long_tail [--steps 12] [--slots 64] [--over-provision 1.25 3] [--picture PNG]

Prints a table and draws a picture. The collector, the ledger and the journal are the real ones; the engine and its
clock are simulated (`simulation`), so the numbers depend on the seed alone: two runs print the same. Lengths are
lognormal; a place in flight is a slot of the engine. The modes:

- sync: every group of a step begins after the step before it, and all are waited for.
- discard: more groups begin than are needed; once enough have ended, all others are thrown away.
- carry_over: what is unfinished goes on under the next weights; the engine is paused while the learner works.
- async: as carry_over, and the engine samples while the learner works.

All but sync have `over-provision` times the groups of a step in flight. The perfect bound has every slot sampling at
every moment that the mode allows: tokens sampled and not thrown away / slots * seconds per token, plus the learner's
time, or, where both work at once (async), the longer of the two. Exits with an error where a token or a task was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gspo_agent.config import EnvConfig, Limits, RolloutConfig
from gspo_agent.engine.base import Weights
from gspo_agent.env import Env, EnvFactory
from gspo_agent.messages import Message, user
from gspo_agent.rollout import schema
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Lease, Ledger
from gspo_agent.testing import ByteChat
from gspo_agent.trajectory import version_step, weight_version
from tests.benchmarks.long_tail_picture import draw
from tests.benchmarks.simulation import Clock, SimulatedEngine

MODES = ("sync", "discard", "carry_over", "async")
PROMPT_TOKENS = 64  # at most


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is; times in seconds of the simulated clock."""

    slots: int = 64
    groups: int = 16
    size: int = 8
    steps: int = 12
    warm_up: int = 2
    """Steps that the means leave out."""
    mean: int = 4000
    """Tokens of a response, before the cut at `most`."""
    most: int = 32768
    sigma: float = 1.0
    """Of the logarithm of the length."""
    token_seconds: float = 0.02
    learner_seconds: float = 40.0
    over_provision: float = 1.25
    journal_tokens: int = 4096
    seed: int = 0

    def length(self, seed: int) -> int:
        """Tokens of the response of the episode with this seed."""
        drawn = random.Random(seed).lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), 1), self.most)

    @property
    def learner_ticks(self) -> int:
        return round(self.learner_seconds / self.token_seconds)

    def bound(self, tokens: float, mode: str) -> float:
        """Seconds that a step of so many tokens takes where no slot is ever free."""
        rollout = tokens / self.slots * self.token_seconds
        return max(rollout, self.learner_seconds) if mode == "async" else rollout + self.learner_seconds


class Question(Env):
    """One turn, and a reward that depends on the seed alone. No hook needs a thread, of which the clock could not tell
    whether it is at rest."""

    state_level = "replay"

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await super().areset(seed=seed)
        return [user("?")], {}

    async def astep(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        return [], float(self.np_random.random()), True, False, {}

    @classmethod
    async def destroy_leftovers(cls, run_id: str, living: Collection[str]) -> None:  # type: ignore[override]
        return None


class Questions:
    """An endless source of one task."""

    num_tasks = None

    def task(self, cursor: int) -> dict[str, Any]:
        return {"number": cursor}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training, from the end of the one before it to its own."""

    began: int
    learned: int
    """When the learner began."""
    ended: int
    tokens: int
    """Trained on."""
    sampled: int
    """By the engine, while the step lasted."""
    lags: Counter[int]
    """Steps between a token's weights and the ones that the step leads to -> tokens. 1 is fresh."""


@dataclass(slots=True)
class Outcome:
    """What a mode did; times in ticks."""

    mode: str
    scale: Scale
    steps: list[Step] = field(default_factory=list)
    occupancy: list[tuple[int, int]] = field(default_factory=list)
    sampled: int = 0
    """Tokens, until the last step was done."""
    unfinished: int = 0
    """Tokens in the journal, at the end, that no step has trained on yet."""

    @property
    def name(self) -> str:
        return self.mode if self.mode == "sync" else f"{self.mode} x{self.scale.over_provision:g}"

    @property
    def trained(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def thrown_away(self) -> int:
        return self.sampled - self.trained - self.unfinished

    @property
    def measured(self) -> list[Step]:
        return self.steps[self.scale.warm_up :]

    @property
    def seconds(self) -> float:
        """For one step, on average."""
        return (self.measured[-1].ended - self.measured[0].began) * self.scale.token_seconds / len(self.measured)

    @property
    def tokens(self) -> float:
        """Sampled in one step and not thrown away, on average. What a step trains on may be older than all of them."""
        steps = self.measured
        return sum(step.tokens if self.mode == "discard" else step.sampled for step in steps) / len(steps)

    @property
    def bound(self) -> float:
        return self.scale.bound(self.tokens, self.mode)

    @property
    def utilisation(self) -> float:
        """Share of the slots' time in which they sampled."""
        ticks = self.measured[-1].ended - self.measured[0].began
        return sum(step.sampled for step in self.measured) / (ticks * self.scale.slots)

    @property
    def staleness(self) -> dict[int, float]:
        """Lag -> share of the tokens trained on."""
        lags = sum((step.lags for step in self.measured), Counter[int]())
        return {lag: tokens / lags.total() for lag, tokens in sorted(lags.items())}


class World:
    """A clock, an engine on it, and the journals that come and go with the mode."""

    def __init__(self, mode: str, scale: Scale, directory: Path, clock: Clock) -> None:
        self.scale, self.directory, self.clock = scale, directory, clock
        self.engine = SimulatedEngine(clock, scale.slots, scale.length, scale.most + PROMPT_TOKENS)
        self.outcome = Outcome(mode, scale)

    async def train(self) -> Outcome:
        """As `trainer.Session` does, with a learner that only takes its time."""
        mode = self.outcome.mode
        with self.open(self.directory / "journal.sqlite", self.scale.seed) as (journal, ledger, collector):
            await self.engine.update_weights(_weights(journal.life, 0))
            await collector.start(0)
            for step in range(1, self.scale.steps + 1):
                began, sampled = self.clock.now, self.engine.sampled
                lease = await collector.lease(self.scale.groups, step=step)
                if mode != "async":
                    await collector.pause()
                await self.learn(began, sampled, lease, ledger)
                await self.engine.update_weights(_weights(journal.life, step))
                await collector.resume()
            await collector.stop()
        self.outcome.unfinished = self.unfinished()
        return self.finished()

    async def discard(self) -> Outcome:
        """Every step begins with an empty journal."""
        for step in range(1, self.scale.steps + 1):
            path = self.directory / str(step) / "journal.sqlite"
            with self.open(path, self.scale.seed * self.scale.steps + step) as (journal, ledger, collector):
                await self.engine.update_weights(_weights(journal.life, 0))
                began, sampled = self.clock.now, self.engine.sampled
                await collector.start(0)
                lease = await collector.lease(self.scale.groups, step=1)
                await collector.stop()
                await self.learn(began, sampled, lease, ledger)
            shutil.rmtree(path.parent)
        return self.finished()

    @contextlib.contextmanager
    def open(self, path: Path, seed: int) -> Iterator[tuple[Journal, Ledger, Collector]]:
        scale, mode = self.scale, self.outcome.mode
        factory = EnvFactory(EnvConfig(id="question"), Question)
        limits = Limits(turns=1, turn_tokens=scale.most, context_tokens=scale.most + PROMPT_TOKENS)
        config = RolloutConfig(
            mode="carry_over" if mode == "discard" else mode,
            group_size=scale.size,
            groups_per_step=scale.groups,
            over_provision=scale.over_provision,
            max_in_flight=scale.slots,
            filter_zero_variance=False,
            expired="keep",
            journal_tokens=scale.journal_tokens,
        )
        with Journal.open(path) as journal:
            self.clock.journal, ledger = journal, Ledger(journal)
            yield journal, ledger, Collector(
                journal=journal, ledger=ledger, sources=[Source(factory, Questions(), limits)], chat=ByteChat(),
                engine=self.engine, config=config, seed=seed,
            )  # fmt: skip
        self.clock.journal = None

    async def learn(self, began: int, sampled: int, lease: Lease, ledger: Ledger) -> None:
        learned = self.clock.now
        await self.clock.sleep(self.scale.learner_ticks)
        await ledger.commit_step(lease.step, lease, (f"step-{lease.step}", "-"))
        lags: Counter[int] = Counter()
        for trajectory in (trajectory for group in lease.groups for trajectory in group.trajectories):
            if trajectory.num_sampled != self.scale.length(trajectory.seed):
                raise AssertionError(f"episode {trajectory.id} has lost some of its tokens")
            for segment in trajectory.segments:
                if segment.weight_version is not None:
                    lags[lease.step - version_step(segment.weight_version)] += len(segment)
        now, tokens = self.clock.now, self.engine.sampled - sampled
        self.outcome.steps.append(Step(began, learned, now, lags.total(), tokens, lags))

    def unfinished(self) -> int:
        """Sampled tokens in the journal that later steps will train on; it must pass its audit."""
        path = self.directory / "journal.sqlite"
        breaches = audit(path).breaches
        if breaches:
            raise AssertionError("; ".join(breaches))
        with closing(schema.read_only(path)) as connection:
            query = (
                "SELECT coalesce(sum(length(token_ids) / 4), 0) FROM events JOIN slots ON slots.id = slot "
                "JOIN groups ON groups.id = group_id WHERE kind = 'sampled' AND groups.state IN ('open', 'ready') "
                "AND slots.state IN ('running', 'done')"
            )
            return int(connection.execute(query).fetchone()[0])

    def finished(self) -> Outcome:
        self.outcome.sampled, self.outcome.occupancy = self.engine.sampled, self.engine.occupancy
        return self.outcome


def _weights(life: int, step: int) -> Weights:
    return Weights(weight_version(life, step), None, lambda: ())


def simulate(mode: str, scale: Scale, directory: Path) -> Outcome:
    """Plays one of MODES, with its journals in `directory`; AssertionError where a token or a task was lost."""
    directory.mkdir()
    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        world = World(mode, scale, directory, clock)
        return runner.run(world.discard() if mode == "discard" else world.train())


HEAD = (
    f"{'mode':<16}{'s/step':>8}{'bound':>8}{'ratio':>7}{'busy':>7}{'tok/step':>10}{'tok each':>9}{'s/Mtok':>8}"
    f"{'sampled':>11}{'thrown away':>20}{'kept':>9}   staleness: share of trained tokens by lag"
)


def row(outcome: Outcome) -> str:
    o, episodes = outcome, outcome.scale.groups * outcome.scale.size * len(outcome.measured)
    length = sum(step.tokens for step in outcome.measured) / episodes
    thrown = f"{o.thrown_away:,} ({o.thrown_away / o.sampled:.0%})"
    lags = "  ".join(f"{lag}: {share:.1%}" for lag, share in o.staleness.items())
    return (
        f"{o.name:<16}{o.seconds:>8.1f}{o.bound:>8.1f}{o.seconds / o.bound:>7.3f}{o.utilisation:>7.1%}"
        f"{o.tokens:>10,.0f}{length:>9,.0f}{o.seconds / o.tokens * 1e6:>8.0f}"
        f"{o.sampled:>11,}{thrown:>20}{o.unfinished:>9,}   {lags}"
    )


def title(scale: Scale) -> str:
    return (
        f"{scale.steps} steps of {scale.groups} groups of {scale.size}, {scale.slots} slots, "
        f"{1 / scale.token_seconds:g} tokens/s in each; lengths lognormal, mean {scale.mean}, sigma {scale.sigma:g}, "
        f"at most {scale.most}; seed {scale.seed}\n"
        f"bound: rollout = tok/step / {scale.slots} * {scale.token_seconds:g} s, learner {scale.learner_seconds:g} s; "
        f"their sum, and for async the longer of the two\n"
        f"means over the steps after the first {scale.warm_up}: tok/step are sampled in them and not thrown away, "
        f"tok each is the mean length of a response trained on\n"
        f"over all steps: sampled, thrown away, and kept in the journal for later steps"
    )


def main(scale: Scale, over_provision: Sequence[float], picture: Path) -> None:
    print(f"{title(scale)}\n\n{HEAD}", flush=True)
    variants = [("sync", scale)]
    variants += [(mode, replace(scale, over_provision=ahead)) for mode in MODES[1:] for ahead in over_provision]
    outcomes = []
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        for number, (mode, variant) in enumerate(variants):
            outcomes.append(simulate(mode, variant, Path(name) / str(number)))
            print(row(outcomes[-1]), flush=True)
            shutil.rmtree(Path(name) / str(number))
    draw(outcomes, picture)
    print(f"\npicture: {picture}")
    lost = [outcome.name for outcome in outcomes if outcome.thrown_away and outcome.mode != "discard"]
    if lost:
        raise SystemExit(f"tokens were lost in {', '.join(lost)}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for item in fields(Scale):
        if item.name != "over_provision":
            option = f"--{item.name.replace('_', '-')}"
            parser.add_argument(option, type=type(item.default), default=item.default)
    parser.add_argument("--over-provision", type=float, nargs="+", default=[1.25, 3.0])
    parser.add_argument("--picture", type=Path, default=Path(tempfile.gettempdir()) / "long_tail.png")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = vars(parse())
    ahead, picture = arguments.pop("over_provision"), arguments.pop("picture")
    main(Scale(**arguments), ahead, picture)
