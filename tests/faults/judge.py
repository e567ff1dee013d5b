"""Judge: what a run promised, counted from what lies outside of it and from its journal as it is after each death."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import orjson

from gspo_agent.config import Config
from gspo_agent.rollout import schema
from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.events import fold
from gspo_agent.rollout.journal import read_events
from gspo_agent.rollout.leases import retired_step
from gspo_agent.testing import ScriptedEngine
from gspo_agent.trajectory import Trajectory
from tests.faults import twin
from tests.faults.subject import Subject
from tests.faults.world import CHAT, DiceChat, policy


class Judge:
    """Sees one subject through. `losses` says what was lost; empty is what is asked for."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.losses: list[str] = []
        self.counts: Counter[str] = Counter()
        """Of what was looked at, and "most unjournaled tokens of a request"."""
        self._cut: set[str] = set()
        """Ids of calls that had begun, and not ended, when their process died."""
        self._ends: dict[str, int] = {}
        """Episode -> how many of its tokens are in the journal."""
        self._last_event = 0
        self._read = 0

    def look(self) -> None:
        """After a death: what the engine had sampled and the journal does not have, and which calls were cut."""
        if not self._begun():
            return
        with self._connected() as connection:
            before = dict(self._ends)
            names = {
                slot: f"{group}.{number}.{attempt}"
                for slot, group, number, attempt in connection.execute(
                    "SELECT id, group_id, number, attempt FROM slots"
                )
            }
            query = "SELECT id, slot, length(token_ids) / 4 FROM events WHERE id > ? AND token_ids IS NOT NULL"
            for event, slot, length in connection.execute(query, (self._last_event,)):
                self._ends[names[slot]] = self._ends.get(names[slot], 0) + length
                self._last_event = event
            self._compare_tokens(before, set(names.values()))
            self._cut |= set(_open_calls(connection))

    def finish(self) -> None:
        """Has the run come to its end, and looks after each of its last lives."""
        for _ in self._subject.finish():
            self.look()

    def verdict(self) -> None:
        """After the run has come to its end."""
        self.look()
        self.losses += [f"audit: {breach}" for breach in audit(self._subject.journal).breaches]
        with self._connected() as connection:
            self._judge_tasks(connection)
            self._judge_training(connection)
            self._judge_calls(connection)
            self._judge_weights(connection)
            self._judge_failures(connection)
            asyncio.run(self._judge_twins(connection))

    def _begun(self) -> bool:
        """Whether any process has lived until it had a journal with tables."""
        if not self._subject.journal.exists():
            return False
        # Only to read: the last one that might write would take the WAL away.
        with closing(sqlite3.connect(f"file:{self._subject.journal}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'events'").fetchone()[0])

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(schema.read_only(self._subject.journal)) as connection:
            yield connection

    def _compare_tokens(self, before: dict[str, int], known: set[str]) -> None:
        outside, limit = self._subject.outside, self._subject.scenario.journal_tokens
        sampled: dict[str, dict[int, str]] = defaultdict(dict)
        for request, position, count, _version in outside.read("tokens", self._read):
            episode = request.split(".", 2)[2].rpartition("-")[0]
            first = int(position)
            if first < before.get(episode, 0):
                self.losses.append(f"{episode}: sampled at {first} again, {before[episode]} tokens were journaled")
            for place in range(first, first + int(count)):
                sampled[episode][place] = request
        self._read = outside.size("tokens")
        for episode, places in sampled.items():
            if episode not in known:  # trained on and gone, within one life
                continue
            lost = [request for place, request in places.items() if place >= self._ends.get(episode, 0)]
            self.counts["tokens sampled again after a kill"] += len(lost)
            self.counts["most lost of an episode"] = max(self.counts["most lost of an episode"], len(lost))
            if len(lost) > limit:
                self.losses.append(f"{episode}: {len(lost)} sampled tokens were not journaled, the limit is {limit}")

    def _judge_tasks(self, connection: sqlite3.Connection) -> None:
        taken = connection.execute("SELECT coalesce(sum(cursor), 0) FROM cursors").fetchone()[0]
        groups = [cursor for (cursor,) in connection.execute("SELECT cursor FROM groups")]
        for first, last in connection.execute("SELECT first, last FROM retired"):
            groups += range(first, last + 1)
        self.counts["tasks"] += taken
        if sorted(groups) != list(range(taken)):
            self.losses.append(f"{taken} tasks were taken, the groups have {sorted(Counter(groups).items())[:20]}")
        given_up = connection.execute("SELECT count(*) FROM groups WHERE state = 'given_up'").fetchone()[0]
        if given_up:
            self.losses.append(f"{given_up} groups were given up, and no fault asked for it")

    def _judge_training(self, connection: sqlite3.Connection) -> None:
        """What the learner itself saw, life after life, against what the ledger says it was given."""
        lineage: list[tuple[int, list[int]]] = []
        before: list[tuple[int, list[int]]] = []
        for what, step, *groups in self._subject.outside.read("learner"):
            if what == "begun" and step == "0":
                before, lineage = lineage or before, []
            elif what == "begun":
                lineage = [entry for entry in before if entry[0] <= int(step)]
            else:
                lineage.append((int(step), [int(group) for group in groups[0].split(",")]))
        newest = connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0]
        lineage = lineage[:newest]
        leased: dict[int, list[int]] = defaultdict(list)
        rows = connection.execute("SELECT step, group_id FROM leases WHERE NOT filtered ORDER BY step, position")
        for step, group in rows:
            leased[step].append(group)
        gone = retired_step(connection)
        if len(lineage) != newest or lineage[gone:] != [(step, leased[step]) for step in range(gone + 1, newest + 1)]:
            self.losses.append(f"trained {lineage[-4:]}, leased {sorted(leased.items())[-4:]}, committed {newest}")
        trained = [group for _, groups in lineage for group in groups]
        self.counts["steps"] += newest
        self.counts["groups trained"] += len(trained)
        if len(trained) != len(set(trained)):
            self.losses.append(f"trained twice: {[g for g, n in Counter(trained).items() if n > 1]}")
        self._judge_export(lineage[:gone])
        if self._subject.scenario.engine == "scripted":
            self._judge_checkpoint(connection, lineage)
        elif self._subject.scenario.learns:
            self._judge_ratios(connection)

    def _judge_export(self, lineage: list[tuple[int, list[int]]]) -> None:
        """What has left the journal is in files: per step the groups that it trained, every attempt once."""
        folder = self._subject.journal.parent / "episodes"
        if not self._subject.scenario.export:
            return
        from pyarrow import parquet

        for step, groups in lineage:
            file = folder / f"step-{step:06d}.parquet"
            rows = parquet.read_table(file, columns=["group_id", "index", "attempt", "outcome"]).to_pylist()
            exported = list(dict.fromkeys(row["group_id"] for row in rows if row["outcome"] == "consumed"))
            once = {(row["group_id"], row["index"], row["attempt"]) for row in rows}
            self.counts["attempts exported"] += len(rows)
            if exported != groups or len(once) != len(rows):
                self.losses.append(f"{file.name} has groups {exported} in {len(rows)} rows; trained were {groups}")

    def _judge_checkpoint(self, connection: sqlite3.Connection, lineage: list[tuple[int, list[int]]]) -> None:
        row = connection.execute(
            "SELECT checkpoint, step FROM steps WHERE checkpoint IS NOT NULL ORDER BY step DESC"
        ).fetchone()
        saved = orjson.loads((self._subject.checkpoints / row[0] / "lineage.json").read_bytes()) if row else []
        if [(step, groups) for step, groups in saved] != lineage[: row[1] if row else 0]:
            self.losses.append(f"the newest checkpoint was trained on {saved[-4:]}, the lineage is {lineage[-4:]}")

    def _judge_ratios(self, connection: sqlite3.Connection) -> None:
        """Tokens of the weights before a step have ratio 1 under them: an engine with other weights shows here."""
        for step, metrics in connection.execute("SELECT step, metrics FROM steps"):
            worst = orjson.loads(metrics).get("log_s_at_zero_updates/max", 0.0)
            if abs(worst) > 1e-3:
                self.losses.append(f"step {step}: tokens are not of the weights that they name, log s is {worst}")

    def _judge_calls(self, connection: sqlite3.Connection) -> None:
        scenario = self._subject.scenario
        ran = Counter((words[0], words[2]) for words in self._subject.outside.read("calls"))
        query = "SELECT data FROM events WHERE kind = 'call_begun'"
        intended = {orjson.loads(data)[0] for (data,) in connection.execute(query)}
        self.counts["calls"] += len(ran)
        self.counts["calls cut by a kill"] += len(self._cut)
        for (call_id, name), number in ran.items():
            # Idempotent, or of a world that comes back by doing its calls again.
            if name == "look" or scenario.world in ("forgetful", "guess"):
                continue
            if number > 1:
                self.losses.append(f"{call_id} ({name}) ran {number} times")
            if call_id not in intended and scenario.keep_steps == "all":
                self.losses.append(f"{call_id} ({name}) ran and its intent is not in the journal")

    def _judge_weights(self, connection: sqlite3.Connection) -> None:
        seen: dict[int, set[str]] = defaultdict(set)
        for version, fingerprint in self._subject.outside.read("weights"):
            seen[int(version)].add(fingerprint)
        self.counts["weight versions"] += len(seen)
        twice = [version for version, prints in seen.items() if len(prints) > 1]
        if twice:
            self.losses.append(f"weight versions {twice[:5]} named different weights")
        for (data,) in connection.execute("SELECT data FROM events WHERE kind = 'sampled'"):
            unknown = {version for _, version, _ in orjson.loads(data)[2]} - set(seen)
            if unknown:
                self.losses.append(f"tokens of weights {sorted(unknown)}, which were never published")
                return

    def _judge_failures(self, connection: sqlite3.Connection) -> None:
        query = "SELECT stop_reason, count(*) FROM slots WHERE state = 'failed' GROUP BY stop_reason"
        for reason, number in connection.execute(query):
            self.counts["failed attempts"] += number
            if not re.search("|".join(self._subject.excuses) or "^$", reason):
                self.losses.append(f"{number} episodes failed without a fault that explains it: {reason}")

    async def _judge_twins(self, connection: sqlite3.Connection) -> None:
        subject = self._subject
        if subject.scenario.learns and subject.scenario.engine == "local":
            return
        limits = Config.parse(subject.scenario.config(subject.folder, subject.place, 1)).env[0].limits
        engine, chat = _engine(subject)
        blobs = BlobStore(subject.journal.parent / "blobs")
        query = (
            "SELECT slots.id, group_id, number, attempt, slots.seed, task FROM slots "
            "JOIN groups ON groups.id = group_id WHERE slots.state = 'done'"
        )
        met = self._cut | subject.hits
        for slot, group, number, attempt, seed, task in connection.execute(query).fetchall():
            events = read_events(connection, slot, blobs)
            if not events:  # exported, and gone
                continue
            episode = fold(Trajectory(group, number, attempt, seed), events)
            played = await twin.play(episode, subject.scenario.world, orjson.loads(task), engine, chat, limits, met)
            distance = twin.compare(episode.trajectory, played)
            self.counts["twins compared"] += 1
            self.counts["twins that differ by a tie"] += distance.tie
            if not distance.same and not (distance.tie and subject.scenario.engine == "local"):
                self.losses.append(f"{episode.trajectory.id} differs from its uncut twin: {distance.where}")
        await engine.close()


def _open_calls(connection: sqlite3.Connection) -> Iterator[str]:
    """Calls that have begun and not ended; a plain step ends with what was observed."""
    begun: dict[int, dict[str, None]] = defaultdict(dict)
    query = (
        "SELECT slot, kind, data FROM events JOIN slots ON slots.id = slot "
        "WHERE slots.state = 'running' AND kind IN ('call_begun', 'call_ended', 'observed') ORDER BY events.id"
    )
    for slot, kind, data in connection.execute(query):
        if kind == "observed":
            begun[slot].clear()
        elif kind == "call_begun":
            begun[slot][orjson.loads(data)[0]] = None
        else:
            begun[slot].pop(orjson.loads(data)["call_id"], None)
    for calls in begun.values():
        yield from calls


def _engine(subject: Subject) -> tuple[Any, Any]:
    if subject.scenario.engine == "scripted":
        return ScriptedEngine(policy, chunk=1 << 20), CHAT
    from gspo_agent.engine.local import LocalEngine

    return LocalEngine(subject.folder / "model"), DiceChat()
