"""Where an episode's events go: into memory only, or into the journal as well."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from gspo_agent.env import CallLog, CallMeta, Env
from gspo_agent.rollout.events import Begun, CallBegun, CallEnded, Ended, Episode, Event, Observed, Sampled
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger, Settled, Slot
from gspo_agent.rollout.state import SAME, Same, State
from gspo_agent.trajectory import Trajectory

_PROCESS = uuid.uuid4().hex[:12]
_requests = itertools.count(1)
Stage = Literal["", "reset", "journal", "tokens", "tools", "judges", "quota"]
KEPT = ("state", "handle")
"""The levels at which a later life goes on from a recorded state."""
MAX_STATE_BYTES = 64 * 1024 * 1024
INTERRUPTED = (
    "Interrupted: the process died while this was running. Nothing of it is left here; whether it had an effect "
    "elsewhere is unknown."
)


class Recorder:
    """Keeps an episode in memory, and nowhere else."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.episode = Episode(trajectory)
        self.cut = False
        """Set from outside: the episode stops at its next event and can be continued from there."""
        self.request_id = ""
        """Of the request that is being waited for; "" between requests."""
        self.asked = 0
        """The most tokens that it may bring."""
        self.stage: Stage = ""
        """What the episode waits for."""
        self.since = time.monotonic()
        """When it began to wait for that."""
        self.run_id = f"{_PROCESS}-{next(_requests)}"
        """With the episode's id, a name that no other episode anywhere has."""
        self._run = _PROCESS

    def record(self, *events: Event) -> None:
        """Applies events to the episode. All of them, or none, survive."""
        for event in events:
            event.apply(self.episode)

    async def durable(self, *events: Event) -> None:
        """As `record`; returns when nothing can undo it."""
        self.record(*events)

    def enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()

    async def room(self, tokens: int) -> int:
        """How many tokens the next request may sample, so that never more than `tokens` are sampled and not on disk.

        Waits until it is at least half of them, and until there is room for one more request's events.
        """
        return tokens

    async def begin(self) -> None:
        """Returns unless the episode was cut: what runs then may end, nothing begins, and whoever cut it cancels it."""
        if self.cut:
            self.enter("")
            await asyncio.get_running_loop().create_future()

    def introduce(self, env: Env, task: dict[str, Any]) -> None:
        """Tells an environment which episode it plays."""
        env.known_task, env.known_turn = task, max(0, self.episode.turn)
        env.run_id, env.episode_id, env.call_log = self.run_id, self.episode.trajectory.id, self.call_log(env)

    async def snapshot(self, env: Env) -> State | Same | None:
        """The environment's state, if this recorder keeps it."""
        return None

    def call_log(self, env: Env) -> CallLog:
        """What the environment's tool calls pass through."""
        return CallLog()

    def next_request(self, max_new_tokens: int) -> str:
        """A request id that is never used twice and of which no other one is a prefix: engines abort by prefix."""
        self.asked = max_new_tokens
        self.request_id = f"{self._run}.{self.episode.trajectory.id}-{next(_requests)}/"
        return self.request_id


class JournalRecorder(Recorder):
    """Writes every event to the journal as it happens; the end of the episode goes through the ledger."""

    def __init__(
        self, journal: Journal, ledger: Ledger, slot: Slot, episode: Episode | None = None,
        max_state_bytes: int = MAX_STATE_BYTES,
    ) -> None:  # fmt: skip
        super().__init__(slot.trajectory() if episode is None else episode.trajectory)
        if episode is not None:
            self.episode = episode
        self.settled: asyncio.Future[Settled] | None = None
        """Set with the end of the episode: what it led to."""
        self.on_settled: Callable[[Settled], None] | None = None
        """Called with it, in the order of the ledger's transactions."""
        self.lost = False
        """The attempt cannot be gone on with: the next one begins again."""
        self.state_problem: str | None = None
        """Why there is no state to go on from, where the environment's level promised one."""
        self._journal, self._ledger, self._slot = journal, ledger, slot
        self._max_state_bytes = max_state_bytes
        self.run_id, self._run = journal.run_id, f"{journal.run_id}.{journal.life}"
        self._sampled_before = self.episode.sampled
        self._behind: deque[tuple[int, int]] = deque()
        """(end in the log, sampled tokens) of events that may still wait for the disk."""
        self._seen: Any = None
        """What `episode.state` was made from, where the same object again is the same state."""
        self._held: list[Event] = []
        self._resting: Env | None = None
        """Its state after the last of the held events, a CallEnded, has not been looked at."""

    @property
    def sampled_now(self) -> int:
        """Tokens sampled in this life."""
        return self.episode.sampled - self._sampled_before

    def record(self, *events: Event) -> None:
        written = self._with_held(events) if self._held else events
        for event in events:
            event.apply(self.episode)
        last = events[-1]
        if isinstance(last, Ended):
            self._end(last, written)
        elif isinstance(last, Begun):
            self._ledger.begin(self._slot, last)
        else:
            self._journal.append(self._slot.id, *written)
            if isinstance(last, Sampled):
                self._note_behind(sum(map(len, last.segments)))

    def _end(self, event: Ended, written: Sequence[Event]) -> None:
        if len(written) > 1:
            self._journal.append(self._slot.id, *written[:-1])
        trajectory = self.episode.trajectory
        self.settled = asyncio.get_running_loop().create_future()
        self.settled.add_done_callback(self._tell)
        self._ledger.end(self._slot, event, trajectory.reward, trajectory.sampled_by_step(), self.settled)

    def _tell(self, settled: asyncio.Future[Settled]) -> None:
        if self.on_settled is not None and not settled.cancelled() and settled.exception() is None:
            self.on_settled(settled.result())

    async def durable(self, *events: Event) -> None:
        written = self._with_held(events) if self._held else events
        super().record(*events)
        await self._journal.durable(self._slot.id, *written)
        self._behind.clear()

    def hold(self, event: CallBegun | CallEnded, env: Env | None = None) -> None:
        """Records what an observation says as well, if that comes next: the intent of a call that may run again, and
        the end of a call. Whatever else comes next is written behind it.

        Args:
            env: At rest after the end of a call: the state is looked at only if it is needed, before anything happens.
        """
        event.apply(self.episode)
        self._held.append(event)
        self._resting = env

    def write_held(self) -> None:
        """To be called before there may be something to wait for."""
        if self._held:
            self._journal.append(self._slot.id, *self._with_held(()))

    def _with_held(self, events: Sequence[Event]) -> Sequence[Event]:
        """What is to be written now: `events` in the place of those that were held, or after them."""
        held, self._held = self._held, []
        env, self._resting = self._resting, None
        if events and isinstance(events[0], Observed):
            return events
        last = held[-1]
        if env is not None and isinstance(last, CallEnded):
            state = self._state(env.get_state(), env) if env.state_level in KEPT else None
            held[-1] = replace(last, state=state)
            self.episode.keep(state)
        return [*held, *events]

    def _note_behind(self, tokens: int) -> None:
        while self._behind and self._behind[0][0] <= self._journal.written:
            self._behind.popleft()
        self._behind.append((self._journal.end, tokens))

    @property
    def unjournaled(self) -> int:
        """Sampled tokens whose events are not on disk yet; those of the running request are not among them. From any
        thread."""
        written, behind = self._journal.written, tuple(self._behind)
        if not behind or behind[-1][0] <= written:
            return 0
        return sum(tokens for end, tokens in behind if end > written)

    async def room(self, tokens: int) -> int:
        if self._journal.queued:
            await self._journal.room()
        behind = self.unjournaled if self._behind else 0
        if 2 * behind > tokens:
            await self._journal.durable(self._slot.id)
            behind = self.unjournaled
        return tokens - behind

    async def snapshot(self, env: Env) -> State | Same | None:
        """The state after the last change; SAME where there was none, None where the level gives none."""
        if env.state_level not in KEPT:
            return None
        return self._state(await env.aget_state(), env)

    def _state(self, value: Any, env: Env) -> State | Same | None:
        if value is None:
            self.state_problem = getattr(env, "state_problem", None) or "get_state() returned None"
            return None
        if value is self._seen and self.episode.state is not None:
            return SAME
        try:
            state = State.of(value)
        except TypeError as error:
            self.state_problem = f"the state is neither JSON nor bytes: {error}"
            return None
        data, before = state.data, self.episode.state
        if len(data) > self._max_state_bytes:
            self.state_problem = f"the state has {len(data)} bytes, more than {self._max_state_bytes}"
            return None
        self._seen = value if env.seals_state else None
        return SAME if before is not None and before.data == data and before.form == state.form else state

    def call_log(self, env: Env) -> CallLog:
        return JournalCallLog(self, env)


class JournalCallLog(CallLog):
    """Writes down that a call begins before it runs, and its result and the state after it.

    A call that an earlier life finished is answered from the record. One that it began and did not finish runs again
    if it is idempotent; otherwise "interrupted" is its result.
    """

    def __init__(self, recorder: JournalRecorder, env: Env) -> None:
        self._recorder, self._env = recorder, env

    async def run(self, call_id: str, function: Callable[[], Awaitable[Any]], meta: CallMeta) -> Any:
        recorder, kept = self._recorder, keeps_calls(self._env)
        known = recorder.episode.calls.get(call_id) if kept else None
        if known is not None and known.ended:
            return known.result
        recorder.write_held()
        await recorder.begin()
        if known is not None and not meta.idempotent:
            result: Any = {"role": "tool", "content": INTERRUPTED, "outcome": "interrupted"}
        else:
            async with meta.turn:  # before the intent: a call that was cut while it waited has not begun
                await recorder.begin()
                again = meta.idempotent or not kept
                begun = CallBegun(call_id, meta.name, meta.arguments, again)
                if again:
                    recorder.hold(begun)  # lost or not, it runs again
                else:
                    await recorder.durable(begun)
                recorder.enter("tools")  # this one, from now on
                result = await function()
        if meta.at_rest:
            recorder.hold(CallEnded(call_id, result), self._env)
        else:
            recorder.record(CallEnded(call_id, result, await recorder.snapshot(self._env)))
        return result


def keeps_calls(env: Env) -> bool:
    """Whether the record of a tool call is the truth for a later life, and not only there to be looked at.

    At the levels "replay" and "none" it is not: the instance of a later life has seen nothing, so every call has to run
    in it, to bring back what it did inside. Where the whole step is one call, that one is recorded.
    """
    return env.logs_calls and env.state_level in KEPT
