"""run_episode: the agent loop. It continues a trajectory and never asks whether that was cut."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_agent.clock import Clock, within
from gspo_agent.config import Limits
from gspo_agent.engine.base import Completion, Engine, Sampling
from gspo_agent.env import Env
from gspo_agent.env.calls import calling
from gspo_agent.errors import (
    ConfigError,
    EngineError,
    EnvError,
    JournalError,
    StateLost,
    Unscored,
    boundary,
    cause_of,
    is_fault,
)
from gspo_agent.messages import Message, user
from gspo_agent.rollout.events import CallBegun, Ended, Observed, Sampled, Spent, StopReason
from gspo_agent.rollout.recorder import INTERRUPTED, KEPT, Recorder, Stage
from gspo_agent.rollout.state import SAME, Same, State
from gspo_agent.sandbox import marks
from gspo_agent.trajectory import Segment, Status, Trajectory
from gspo_agent.waiting import told

if TYPE_CHECKING:
    # At run time it would bring transformers along.
    from gspo_agent.chat import Chat

_LEAST_RESET_SECONDS = 1.0  # a reset that ends in time but leaves none truncates the episode instead
_MOST_CHARACTERS = 32  # of a token, over a whole context
_EMPTY_REPLY_PAUSE = 0.05  # seconds before a request that was cut before its first token is sent again


async def run_episode(
    trajectory: Trajectory,
    *,
    env: Env,
    chat: Chat,
    engine: Engine,
    task: Mapping[str, Any],
    limits: Limits,
    temperature: float = 1.0,
    recorder: Recorder | None = None,
    journal_tokens: int = 256,
    renew: Callable[[], Env] | None = None,
    clock: Clock | None = None,
) -> Trajectory:
    """Plays until the episode is over, or `recorder.cut` is set, and returns the same trajectory.

    Every change of the trajectory happens between two awaits, as an event of `recorder`. A fault of environment, engine
    or sandbox ends it as FAILED, with the cause as its stop reason; only JournalError, ConfigError and cancellation get
    out.

    Args:
        env: Not yet reset for a fresh trajectory; at the last recorded state for one that goes on.
        recorder: Has the episode that `trajectory` belongs to. None: one that records nothing, for a fresh trajectory.
        journal_tokens: The most sampled tokens of one request, and of all whose events are not on disk yet.
        renew: Makes a fresh instance, to replace one that a tool's deadline left unusable.
        clock: Times the waiting for tokens. None: one that never stands still.
    """
    recorder = recorder or Recorder(trajectory)
    if recorder.episode.trajectory is not trajectory:
        raise ValueError("the recorder has another trajectory")
    task = dict(task)
    recorder.introduce(env, task)
    env.score_seconds = limits.score
    clock = clock or Clock()
    player = _Player(env, chat, engine, task, limits, temperature, recorder, journal_tokens, renew, clock)
    try:
        await player.play()
    except (JournalError, ConfigError):
        raise
    except BaseException as fault:
        if not is_fault(fault):
            raise
        where = "".join(traceback.format_exception(fault))[-4000:].encode("utf-8", "replace").decode()
        recorder.record(Ended(Status.FAILED, cause_of(fault), traceback=where))
    finally:
        if player.env is not env:
            cut = trajectory.status is Status.PARTIAL
            await (player.env.adetach() if cut else player.env.aclose())
    return trajectory


@dataclass(slots=True)
class _Player:
    env: Env
    chat: Chat
    engine: Engine
    task: dict[str, Any]
    limits: Limits
    temperature: float
    recorder: Recorder
    journal_tokens: int
    renew: Callable[[], Env] | None
    clock: Clock

    async def play(self) -> None:
        """One reset, request or step after the other; what comes next follows from the episode alone."""
        recorder, episode = self.recorder, self.recorder.episode
        trajectory = episode.trajectory
        while trajectory.status is Status.PARTIAL and trajectory.stop_reason is None:
            if recorder.cut:
                return
            if episode.turn >= 0 and episode.action is None:
                await self.sample()
                continue
            author = f"{type(self.env).__name__}.{'reset' if episode.turn < 0 else 'step'}"
            with boundary(EnvError, author):
                await (self.reset() if episode.turn < 0 else self.step())
        limit = str(trajectory.stop_reason)
        if trajectory.status is not Status.PARTIAL and limit != StopReason.UNCLOSED_TURN:
            _finite(trajectory.reward)  # each was, but not always their sum
            recorder.record(Ended(trajectory.status, limit))
            return
        with self._aside("judges", Clock()), boundary(EnvError, f"{type(self.env).__name__}.afinish"):
            score, info = await self.env.averdict(limit)
            reward, (components, metrics) = _finite(score), _shown(info)
            _finite(trajectory.reward + reward)
        recorder.record(Ended(Status.TRUNCATED, limit, reward, components, metrics))

    async def reset(self) -> None:
        episode, env = self.recorder.episode, self.env
        seed = episode.trajectory.seed
        wall = None if self.limits.wall is None else max(self.limits.wall, _LEAST_RESET_SECONDS)
        self.recorder.enter("reset")
        try:
            with self._timed(time.monotonic) as seconds:
                async with asyncio.timeout(wall) as deadline:
                    messages, info = await env.areset(seed=seed, options={"task": self.task})
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EnvError(f"{type(env).__name__}.reset took longer than limits.wall, {wall:g} s") from None
        tools = list(env.tool_schemas)
        if self._cannot_fit(messages):
            raise EnvError(
                f"{type(env).__name__}.reset: the first messages are longer than context_tokens = {self._context} can "
                "hold; shorten the task, or raise the limit"
            )
        tail = self.chat.open(messages, tools)
        state = await self.recorder.snapshot(env)
        self.recorder.record(
            Observed(0, messages, tail, metrics=_shown(info)[1] | marks(), tools=tools, state=state, seconds=seconds())
        )

    async def sample(self) -> None:
        """One bounded request, or the limit that leaves no room for one."""
        recorder, episode = self.recorder, self.recorder.episode
        left, limit = self._tokens_left()
        if episode.turn >= self.limits.turns:
            return self._end_at(StopReason.TURNS)
        if left <= 0:
            return self._end_at(limit)
        if self._wall_left() <= 0:
            return self._end_at(StopReason.WALL)
        recorder.enter("journal")
        room = await recorder.room(self.journal_tokens)
        stops = self.chat.stop_token_ids
        sampling = Sampling(min(left, room), self.temperature, tuple(stops), seed=episode.trajectory.seed)
        recorder.enter("quota")
        async with self.engine.turn:
            if recorder.cut:
                return
            recorder.enter("tokens")
            with self._timed(self.clock.now) as seconds:
                request_id, completion = await self._generate(sampling)
        segments = [segment.of_turn(episode.turn) for segment in completion.segments]
        sampled = sum(map(len, segments))
        if not sampled:
            if completion.finish_reason != "abort":
                raise EngineError(f"{self.engine.name} sampled nothing and said {completion.finish_reason!r}")
            recorder.record(Spent(seconds()))
            await asyncio.sleep(0 if recorder.cut else _EMPTY_REPLY_PAUSE)
            return
        # A stop token that came with an abort or a full request ends the turn all the same.
        done = completion.finish_reason == "stop" or int(segments[-1].token_ids[-1]) in stops
        finish = "stop" if done else limit.value if sampled >= left else None
        action = shown = self._parsed(segments) if done else None
        if action is not None and self.env.state_level != "replay":  # which repeats what was typed, all of it
            shown = self.env.redact(action)
        recorder.record(
            Sampled(
                episode.turn, len(episode.token_ids), segments, request_id, finish, seconds(),
                action, None if shown == action else shown,
            )
        )  # fmt: skip

    def _parsed(self, segments: Sequence[Segment]) -> Message:
        """The turn that these last tokens finish."""
        episode = self.recorder.episode
        turn_ids = episode.token_ids[episode.turn_start :].tolist()
        for segment in segments:
            turn_ids += segment.token_ids.tolist()
        return self.chat.parse(turn_ids, episode.tools)

    async def _generate(self, sampling: Sampling) -> tuple[str, Completion]:
        """Asks the engine; past the episode's wall time the request is aborted and what it has is taken."""
        recorder, alarm = self.recorder, None
        request_id = recorder.next_request(sampling.max_new_tokens)
        if self.limits.wall is not None:
            loop = asyncio.get_running_loop()
            abort = self.engine.abort
            alarm = self.clock.alarm(self._wall_left(), lambda: loop.create_task(_quietly(abort(request_id))))
        try:
            # A copy: an array that somebody still looks into could not grow.
            prompt = recorder.episode.token_ids[:]
            return request_id, await self.engine.generate(prompt, sampling, request_id=request_id)
        finally:
            recorder.request_id = ""
            if alarm is not None:
                alarm.cancel()

    async def step(self) -> None:
        """The environment's answer to the turn, or the limit that stands against asking it."""
        recorder, episode, env = self.recorder, self.recorder.episode, self.env
        action = self._action()
        calls = sum("error" not in call for call in action.get("tool_calls", ()))
        if self.limits.tool_calls is not None and calls and episode.tool_calls > self.limits.tool_calls:
            return self._end_at(StopReason.TOOL_CALLS)
        if self._wall_left() <= 0:
            return self._end_at(StopReason.WALL)
        wall = None if self.limits.wall is None else self._wall_left()
        own = Clock()
        try:
            with self._aside("tools", own), self._timed(own.now) as seconds:
                async with within(own, wall) as deadline:
                    messages, reward, terminated, truncated, info = await self._answer(env)
        except TimeoutError:
            if not deadline.expired():
                raise
            self._end_at(StopReason.WALL, seconds())
            if self.renew is not None or env.tainted:
                await self._renew()
            return
        over = terminated or truncated
        if not messages and not over:
            raise EnvError(f"{type(env).__name__}.step returned no message and did not end the episode")
        tail: Sequence[int] | None = ()
        if not over and self._cannot_fit(messages):
            return self._end_at(StopReason.CONTEXT_TOKENS)
        if not over:
            tail = self.chat.extend(episode.token_ids[:], episode.turn_start, messages, episode.tools)
        components, metrics = _shown(info)
        state = SAME if over else await recorder.snapshot(env)
        recorder.record(
            Observed(
                episode.turn + 1, messages, tail, _finite(reward), bool(terminated), bool(truncated),
                components, metrics, state=state, seconds=seconds(),
            )
        )  # fmt: skip
        if env.tainted and not over:
            await self._renew(state)

    def _end_at(self, limit: StopReason, seconds: float = 0.0) -> None:
        """The limit is recorded before the score is asked for: a cut in between ends the episode at the same one."""
        self.recorder.record(Spent(seconds, limit.value))

    @contextmanager
    def _aside(self, stage: Stage, own: Clock) -> Iterator[None]:
        """Where all that the episode does is wait for others, `own` stands still, and what it waits for is shown."""
        recorder = self.recorder

        def wait(what: Any) -> None:
            own.stop()
            recorder.enter(what)

        def go_on() -> None:
            own.go()
            recorder.enter(stage)

        recorder.enter(stage)
        with told(wait, go_on):
            yield

    @contextmanager
    def _timed(self, now: Callable[[], float]) -> Iterator[Callable[[], float]]:
        """Gives the seconds since it was entered; those of what is cut in it count as well."""
        started = now()
        try:
            yield lambda: now() - started
        except asyncio.CancelledError:
            self.recorder.record(Spent(now() - started))
            raise

    async def _answer(self, env: Env) -> tuple[Any, ...]:
        """The environment's step. Where it does not log its calls itself, the step is one call: begun once at most."""
        episode, action = self.recorder.episode, self._action()
        if env.logs_calls:
            return await env.astep(action)
        call_id = f"{env.episode_id}/{episode.turn}/0"
        if call_id in episode.calls:
            return [user(INTERRUPTED)], 0.0, False, False, {}
        async with env.turn_at("step"):
            await self.recorder.begin()
            if env.state_level in KEPT:
                await self.recorder.durable(CallBegun(call_id, "step", {}))
            with calling(env, call_id):
                return await env.astep(action)

    def _action(self) -> Message:
        """The turn to be answered; secret values that were not written down are read from its tokens."""
        episode = self.recorder.episode
        assert episode.action is not None
        if episode.redacted:
            action = self.chat.parse(episode.token_ids[episode.turn_start :].tolist(), episode.tools)
            if self.env.redact(action) != episode.action:
                raise EnvError("a turn with secret values reads otherwise than in the life that sampled it")
            episode.action, episode.redacted = action, False
        return episode.action

    async def _renew(self, state: State | Same | None = SAME) -> None:
        """Replaces an instance in which a call may still be running by a fresh one at the last good state."""
        env, episode = self.env, self.recorder.episode
        if isinstance(state, State):
            value = state.value
        else:
            value = episode.state.value if episode.state is not None else await env.aget_state()
        if self.renew is None or value is None:
            raise StateLost(
                f"{type(env).__name__}: a call past its deadline still runs, and there is no state to go on from"
            )
        fresh = self.renew()
        self.recorder.introduce(fresh, self.task)
        fresh.score_seconds = env.score_seconds
        await fresh.aset_state(value)
        self.env = fresh
        await env.adetach()

    def _tokens_left(self) -> tuple[int, StopReason]:
        """How many tokens the next request may bring, over all cuts, and the limit that says so."""
        episode, limits = self.recorder.episode, self.limits
        left = [
            (limits.turn_tokens - episode.turn_tokens, StopReason.TURN_TOKENS),
            (self._context - len(episode.token_ids), StopReason.CONTEXT_TOKENS),
        ]
        if limits.episode_tokens is not None:
            left.append((limits.episode_tokens - episode.sampled, StopReason.EPISODE_TOKENS))
        return min(left, key=lambda pair: pair[0])

    @property
    def _context(self) -> int:
        return min(self.limits.context_tokens, self.engine.context_tokens)

    def _cannot_fit(self, messages: Sequence[Message]) -> bool:
        """Told by the length alone: megabytes of a tool's output would hold up the event loop while they are
        tokenised, only to end the episode."""
        return sum(len(str(message.get("content"))) for message in messages) > _MOST_CHARACTERS * self._context

    def _wall_left(self) -> float:
        return math.inf if self.limits.wall is None else self.limits.wall - self.recorder.episode.seconds


def _finite(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise Unscored(f"the reward is {value}; raise Unscored where there is no verdict")
    return value


def _shown(info: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Components and metrics of an info, as plain floats. A component that is not finite is no verdict."""
    components = {str(name): _finite(value) for name, value in (info.get("components") or {}).items()}
    metrics = {str(name): float(value) for name, value in (info.get("metrics") or {}).items()}
    return components, metrics


async def _quietly(abort: Any) -> None:
    """An abort that fails leaves the request to end by itself."""
    try:
        await abort
    except EngineError:
        return
