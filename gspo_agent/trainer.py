"""train(config): the loop, on one screen; and what it needs set up before.

The order of its lines is the protocol of the journal: lease, step, checkpoint, commit, publish. A process that dies
between any two of them leaves a run that the same command continues.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gspo_agent.assembly import env_factories, find_model, make_engine, open_sources, tokenizer_digest
from gspo_agent.background import off_loop, rare_collections
from gspo_agent.chat import Chat, load_chat
from gspo_agent.config import Config
from gspo_agent.engine.base import Engine, Sampled, Sampling, Several
from gspo_agent.engine.publish import publish
from gspo_agent.env import EnvFactory
from gspo_agent.errors import CheckpointLost, ConfigError, JournalError
from gspo_agent.evaluate import evaluate_held_out
from gspo_agent.interruption import Interruption
from gspo_agent.learner import checkpoint
from gspo_agent.learner.batch import make_batch
from gspo_agent.learner.learner import Learner
from gspo_agent.learner.process import LearnerProcess
from gspo_agent.messages import user
from gspo_agent.monitor.agreement import disagreement
from gspo_agent.monitor.drift import DriftAlarm
from gspo_agent.monitor.metrics import engine_use, staleness, summarise
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout import export
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Lease, Ledger
from gspo_agent.rollout.pulse import Pulse
from gspo_agent.rollout.retention import Retention
from gspo_agent.run import Run
from gspo_agent.serving import Serving, serving
from gspo_agent.trajectory import weight_version

AnyLearner = Learner | LearnerProcess
_COMPARED_TOKENS = 128
_CLOSE_SECONDS = 0.15  # each of engine, learner and environments, in the two seconds that a cut may take


def train(config: Config, env: type | Callable[..., Any] | None = None, *, allow_changes: bool = False) -> Run:
    """Trains until `config.run.steps`, going on where an earlier call on the same run directory stopped.

    `env` replaces the class of the first `[[env]]`; its tasks, limits and options stay those of the configuration.
    Blocks; use `train_async` inside a running event loop.
    """
    return asyncio.run(train_async(config, env, allow_changes=allow_changes))


async def train_async(
    config: Config,
    env: type | Callable[..., Any] | None = None,
    *,
    allow_changes: bool = False,
    screen: Screen | None = None,
    interruption: Interruption | None = None,
) -> Run:
    """`train` as a coroutine. Cancelling it stops the run with everything durable; tools that run then get the time
    that `interruption` has for them."""
    screen = screen or Screen(config)
    factories = env_factories(config, env)
    # A task file that cannot be read is named before minutes are spent on a model.
    sources = open_sources(config, factories, "train")
    held_out = open_sources(config, factories, config.evaluation.split) if config.evaluation.episodes else []
    if config.run.export:
        export.check_available()
    run = Run.prepare(config, allow_changes=allow_changes)
    with (
        screen,
        Journal.open(run.journal, durability=config.run.durability) as journal,
        Pulse(journal, screen.now, patience=config.run.watchdog) as pulse,
    ):
        run.record_config(config)
        how = interruption or Interruption()
        await Session(
            config, run, journal, screen, pulse, factories, sources, held_out, how, allow_changes
        ).run_to_end()
    return run


@dataclass(slots=True)
class Session:
    """One life of a run: from taking its lock to the last step or the cut."""

    config: Config
    run: Run
    journal: Journal
    screen: Screen
    pulse: Pulse
    factories: Sequence[EnvFactory]
    sources: Sequence[Source]
    held_out: Sequence[Source]
    interruption: Interruption
    allow_changes: bool = False
    retention: Retention = field(init=False)
    learning: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the learner computes."""
    version: int | None = None
    """Of the learner's weights; None while they change, or are about to."""

    def __post_init__(self) -> None:
        config = self.config.run
        self.retention = Retention(self.journal, config.keep_steps, self.run.episodes if config.export else None)

    async def run_to_end(self) -> None:
        config, run, screen = self.config, self.run, self.screen
        ledger = Ledger(self.journal)
        model_path = await off_loop(find_model, config, self.factories, run, screen)
        chat = await off_loop(load_chat, model_path)
        await self._refuse_another_tokenizer(model_path)
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(_close, self._close_environments)
            leaving.push_async_callback(_close, self.retention.stop)
            servers = await leaving.enter_async_context(serving(config, model_path, screen, training=True))
            learner = await off_loop(self._learner, model_path)
            leaving.push_async_callback(_close, off_loop, learner.close)
            step = await self._restore(learner, ledger)
            screen.phase("waiting for servers")
            await servers.ready()
            engine = await off_loop(make_engine, config, model_path, servers.urls)
            leaving.push_async_callback(_close, engine.close)
            await engine.open()
            collector = Collector(
                journal=self.journal,
                ledger=ledger,
                sources=self.sources,
                chat=chat,
                engine=engine,
                config=config.rollout,
                seed=config.run.seed,
            )
            leaving.push_async_callback(self._stop, collector)
            self.pulse.watch(collector, engine)
            screen.watch(collector.progress, engine.stats, partial(self._concerns, engine, servers))
            leaving.enter_context(rare_collections())
            await self._publish(learner, step, engine)
            await self._compare(learner, engine, chat)
            await self._evaluate(step, chat, engine)
            await collector.start(step)
            step = await self._loop(step, ledger, learner, engine, collector, chat)
            await collector.stop()
            await self._evaluate(step, chat, engine)
            await off_loop(run.draw)
            await self.retention.finish()
        screen.finished(run.steps(), run.evaluations(), run.curve)

    async def _loop(
        self, step: int, ledger: Ledger, learner: AnyLearner, engine: Engine, collector: Collector, chat: Chat
    ) -> int:
        """Consumes leases until the last step; each turn waits for enough groups, then for the learner."""
        config, run, screen = self.config, self.run, self.screen
        alarm = DriftAlarm(config.learner.max_logprob_diff, run.steps())
        while step < config.run.steps:
            screen.phase("waiting for groups")
            used = engine.stats()
            lease = await collector.lease(config.rollout.groups_per_step, step=step + 1)
            screen.phase("learning")
            if config.rollout.mode != "async":
                await collector.pause()
            if config.engine.placement == "colocated":
                await engine.release()
            self.version = None
            async with self.learning:
                metrics = await off_loop(self._learn, learner, lease)
            step += 1
            saved = None
            if step % config.run.checkpoint_every == 0 or step == config.run.steps:
                screen.phase("saving")
                saved = await off_loop(learner.save, run.checkpoints, step)
            # Groups of equal rewards teach nothing, but they are what the policy did.
            episodes = [t for group in (*lease.groups, *lease.filtered) for t in group.trajectories]
            metrics |= summarise(episodes, config.evaluation.pass_threshold) | staleness(episodes, step)
            metrics |= {"groups/filtered": float(len(lease.filtered))} | engine_use(used, engine.stats())
            covered = None if saved is None else (saved.name, saved.digest)
            await ledger.commit_step(step, lease, checkpoint=covered, metrics=metrics)
            await self._publish(learner, step, engine)
            await collector.resume()
            screen.step(step, metrics)
            if warning := alarm.step(step, metrics):
                screen.note(warning, "bold yellow")
            if saved is not None:
                checkpoint.prune(run.checkpoints, config.run.keep_checkpoints, {saved.name})
                await self.retention.begin(min(checkpoint.saved_steps(run.checkpoints), default=step))
            if step < config.run.steps:
                await self._evaluate(step, chat, engine)
            if screen.time_to_draw():
                await off_loop(run.draw)
        return step

    def _learn(self, learner: AnyLearner, lease: Lease) -> dict[str, float]:
        batch = make_batch(
            lease.groups,
            step=lease.step,
            max_weight_lag=lease.max_weight_lag,
            advantage_std=self.config.learner.advantage_std,
        )
        return learner.step(batch)

    async def _publish(self, learner: AnyLearner, step: int, engine: Engine) -> None:
        """Returns when every later token comes from the learner's weights. Servers that load them from disk find them
        in the run directory, which keeps those of two steps: who is brought back meanwhile may still read the older
        ones."""
        self.version = weight_version(self.journal.life, step)
        weights = await off_loop(learner.weights, self.version)
        how = self.config.engine
        if how.kind == "local":
            return await publish(weights, engine)
        self.screen.phase("publishing weights")
        if how.weights != "disk":
            return await publish(weights, engine)
        path = await off_loop(learner.export, self.run.weights, step)
        await publish(replace(weights, path=path), engine)
        await off_loop(checkpoint.prune, self.run.weights, 2, {path.name})

    async def _compare(self, learner: AnyLearner, engine: Engine, chat: Chat) -> None:
        """Says so where a server's log-probabilities are not the learner's: now, and whenever one comes back that was
        away. Where the learner works then, that is with the next weights."""
        if not isinstance(engine, Several):
            return
        config, temperature = self.config.learner, self.config.rollout.temperature
        prompt = chat.open([user("Tell a story.")], [])

        async def compare(sampled: Sampled) -> bool:
            if sampled.weight_version != self.version:  # else it would wait as long as a step takes
                return False
            async with self.learning:
                if sampled.weight_version != self.version:
                    return False
                scored, at_one = [
                    (await off_loop(learner.score, [*prompt, *sampled.token_ids], t))[len(prompt) - 1 :]
                    for t in (temperature, 1.0)
                ]
            if warning := disagreement(
                sampled, scored, at_one, temperature=temperature, dtype=config.dtype, bound=config.max_logprob_diff
            ):
                self.screen.note(warning, "bold yellow")
            return True

        await engine.compare_each(prompt, Sampling(_COMPARED_TOKENS, temperature), compare)

    def _concerns(self, engine: Engine, servers: Serving) -> str:
        """What stands still, and which servers get no requests and why."""
        out = {**(engine.problems() if isinstance(engine, Several) else {}), **servers.problems()}
        return "; ".join(filter(None, (self.pulse.concerns(), *(f"{url}: {why}" for url, why in out.items()))))

    async def _restore(self, learner: AnyLearner, ledger: Ledger) -> int:
        """The step of the newest checkpoint that can be read, and its weights in the learner; 0 before the first.

        Where the newest of all cannot be read, the steps after the one that can are forgotten: they are trained again
        on the same groups. Where all are lost, that is every step, as long as the journal has them all. Raises
        JournalError where none can be read otherwise.
        """
        problems: list[JournalError] = []
        for record in ledger.checkpoints():
            path = self.run.checkpoints / str(record.checkpoint)
            if problems and not path.is_dir():  # gone long ago, as it should be
                continue
            self.screen.phase(f"restoring step {record.step}")
            try:
                await off_loop(learner.restore, path, record.digest)
            except JournalError as problem:
                problems.append(problem)
                self.screen.note(str(problem), "bold red")
                continue
            if problems:
                await ledger.roll_back(record.step)
                self.screen.note(
                    f"going on from {path.name} instead: what came after step {record.step} is trained again from the "
                    "journal, and nothing of it is generated again",
                    "bold red",
                )
            if record.step > self.config.run.steps:
                steps = self.config.run.steps
                self.screen.note(f"step {record.step} is done already, and run.steps is {steps}: nothing more to train")
            return record.step
        if problems:
            await self._begin_again(problems, ledger)
        return 0

    async def _begin_again(self, problems: Sequence[JournalError], ledger: Ledger) -> None:
        """Forgets every step, so that all are trained again from the model that the run began with."""
        # Another machine or another version may read one that is whole.
        whole = next((problem for problem in problems if not isinstance(problem, CheckpointLost)), None)
        unreadable = f"{whole or problems[0]}; no other checkpoint in {self.run.checkpoints} can be read either"
        if whole is not None:
            raise JournalError(unreadable)
        try:
            await ledger.roll_back(0)
        except JournalError as problem:
            raise JournalError(f"{unreadable}, and {problem}") from None
        self.screen.note(
            "going on from the model that the run began with: every step is trained again from the journal, and "
            "nothing of it is generated again",
            "bold red",
        )

    async def _stop(self, collector: Collector) -> None:
        self.screen.phase("stopping: writing down what is unfinished")
        await collector.stop(self.interruption.grace)

    async def _close_environments(self) -> None:
        await asyncio.gather(*(factory.aclose() for factory in self.factories))

    async def _refuse_another_tokenizer(self, model_path: Path) -> None:
        """What is journaled are token ids: under another tokenizer or template they would say something else."""
        digest = tokenizer_digest(model_path)
        if digest is None:
            return

        def recorded(connection: sqlite3.Connection) -> str:
            how = "REPLACE" if self.allow_changes else "IGNORE"
            connection.execute(f"INSERT OR {how} INTO run VALUES ('tokenizer', ?)", (digest,))
            return str(connection.execute("SELECT value FROM run WHERE key = 'tokenizer'").fetchone()[0])

        if await self.journal.transact(recorded) != digest:
            raise ConfigError(
                f"the tokenizer or chat template in {str(model_path)!r} is not the one that {str(self.run.dir)!r} "
                "began with; bring it back, use another run.dir, or --allow-changes to go on all the same"
            )

    async def _evaluate(self, step: int, chat: Chat, engine: Engine) -> None:
        """Measures the held-out tasks once per step, however often the run is started."""
        every = self.config.evaluation.every
        due = step in (0, self.config.run.steps) or bool(every and step % every == 0)
        if not due or not self.config.evaluation.episodes or step in dict(self.run.evaluations()):
            return
        self.screen.phase("measuring the held-out tasks")
        evaluation = await evaluate_held_out(self.config, self.held_out, chat, engine, self.screen.advance)
        metrics = evaluation.metrics(self.config.evaluation.pass_threshold)
        if metrics["episodes"]:  # else the next start measures again
            self.run.record_evaluation(step, metrics)
        self.screen.evaluation(step, metrics, evaluation.failures)

    def _learner(self, model_path: Path) -> AnyLearner:
        config = self.config
        # Two that compute at once need two interpreters: in one of them sampling would wait for learning all the same.
        kind = LearnerProcess if config.rollout.mode == "async" else Learner
        return kind(
            config.learner,
            model_path,
            temperature=config.rollout.temperature,
            total_steps=config.run.steps,
            seed=config.run.seed,
            threads=config.engine.threads,
        )


async def _close(close: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    """Closes what has nothing to lose. Whoever is cut waits for it no more than a moment."""
    task = asyncio.current_task()
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS if task is not None and task.cancelling() else None):
            await close(*arguments)
