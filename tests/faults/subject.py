"""Subject: a run under attack, with its lives one after another, seen from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

from gspo_agent.learner import checkpoint
from gspo_agent.rollout import lock, schema
from tests.faults import learner as lineage
from tests.faults.disk import Disk
from tests.faults.outside import Outside
from tests.faults.scenario import Scenario
from tests.faults.zygote import Life, Zygote

PATIENCE = 30.0
"""Seconds in which a life must start, end or answer."""
_LAST_LIVES = 9


class Loss(Exception):
    """Something that must not happen has happened."""


class Subject:
    """One run in `folder`; at most one life at a time is its own."""

    def __init__(self, folder: Path, scenario: Scenario, zygote: Zygote, sabotage: str | None = None) -> None:
        self.folder, self.scenario, self._zygote, self._sabotage = folder, scenario, zygote, sabotage
        folder.mkdir(parents=True, exist_ok=True)
        self.disk = Disk(folder / "disk", 96)
        self.outside = Outside(folder / "outside")
        self.log = folder / "log"
        self.place = self.disk.path / "run"
        """The run's directory, which may be moved between two lives."""
        self.host: str | None = None
        """What the next lives' machine is called; None: its own name."""
        self.life: Life | None = None
        self.started = False
        self.clock = 0.0
        """Seconds by which every later life's clock is off."""
        self.hits: set[str] = set()
        """Ids of tool calls that a fault met."""
        self.excuses: set[str] = set()
        """Patterns of what an attempt may have failed with, for a fault that did it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "campaign.sock"))

    @property
    def journal(self) -> Path:
        return self.place / "journal.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    def begin(self, steps: int = 100_000, die_at: tuple[str, int] | None = None, **more: Any) -> Life:
        """Starts a life."""
        assert self.life is None
        self.life, self.started = self.fork(steps, die_at, **more), False
        return self.life

    def fork(self, steps: int, die_at: tuple[str, int] | None = None, **more: Any) -> Life:
        """A process with the run's command; `more` are arguments of the victim."""
        scenario = self.scenario
        arguments = {
            "folder": str(self.folder),
            "config": scenario.config(self.folder / "model", self.place, steps),
            "engine": scenario.engine,
            "chunk": scenario.chunk,
            "delay": scenario.delay,
            "clock": self.clock,
            "host": self.host,
            "die_at": die_at,
            "sabotage": self._sabotage,
            **more,
        }
        return self._zygote.fork("tests.faults.victim:main", arguments, self.log)

    def alive(self) -> Life:
        """The life that goes on, started if there is none, and past its start."""
        life = self.life or self.begin()
        if not self.started:
            self.hear("started")
            self.started = True
        return life

    def hear(self, event: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Waits for the current life to say `event`."""
        assert self.life is not None
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(min(left, 0.2))
            with suppress(TimeoutError):
                heard = json.loads(self._socket.recv(1 << 16))
                if heard["pid"] == self.life.pid and heard["event"] == event:
                    return dict(heard)
            if self.life.over:
                status = self.life.wait(0)
                raise Loss(f"the process ended by itself with status {status}: {self.last_words()}")
        raise Loss(f"no {event!r} within {seconds:g} s: {self.last_words()}")

    def order(self, what: str, **how: Any) -> int:
        """Has the living one do something to itself; returns what it says of it."""
        assert self.life is not None
        with suppress(ConnectionRefusedError):  # it has ended, as will be heard
            self._socket.sendto(
                json.dumps({"do": what, **how}).encode(), str(self.folder / f"victim-{self.life.pid}.sock")
            )
        return int(self.hear("obeyed").get("number", 0))

    def kill(self) -> None:
        if self.life is not None:
            self.life.kill()
        self.bury()

    def bury(self, survivors: bool = True) -> None:
        """Forgets a life that is over, after what it started has gone too."""
        life, self.life = self.life, None
        for _, pid in self.outside.running_tools():  # a stopped one would wait for ever
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while life is not None and survivors and (left := life.session()):
            if time.monotonic() > until:
                raise Loss(f"processes {left} outlived the trainer that started them by five seconds")
            time.sleep(0.01)
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1 << 16)

    def finish(self) -> Iterator[None]:
        """Ends the life that goes on as a scheduler would; then the run comes to its end, and to the end of every group
        that it had begun before. Yields after every life: each may cut calls as it ends."""
        if self.life is not None:
            self.alive()
            self.life.send(signal.SIGTERM)
            if self.life.wait(PATIENCE) is None:
                raise Loss(f"SIGTERM did not end the run: {self.last_words()}")
            self.bury()
            yield
        begun = self._unsettled()
        for more in range(1, _LAST_LIVES):
            # A step settles two groups; with tokens that expire at once, one may be overtaken several times.
            life = self.begin(self.last_step() + more + len(begun) // 2)
            status = life.wait(2 * PATIENCE)
            if status != 0:
                raise Loss(f"the run did not come to its end without faults, status {status}: {self.last_words()}")
            self.bury()
            yield
            begun &= self._unsettled()
            if not begun:
                return
        raise Loss(f"groups {sorted(begun)} are not settled, {self.last_step()} steps are done")

    def _unsettled(self) -> set[int]:
        if not self.last_step():
            return set()
        with closing(schema.read_only(self.journal)) as connection:
            query = "SELECT id FROM groups WHERE state IN ('open', 'ready', 'leased')"
            return {group for (group,) in connection.execute(query)}

    def last_step(self) -> int:
        if not self.journal.exists():
            return 0
        with closing(schema.read_only(self.journal)) as connection, suppress(sqlite3.Error):
            return int(connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0])
        return 0

    def stop_a_tool(self) -> str:
        """SIGSTOP of a tool that runs now; its call id."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for call_id, pid in self.outside.running_tools():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    return call_id
        raise Loss("no tool runs")

    def covered(self) -> int:
        """The last step that a checkpoint covers."""
        return max((int(path.name.removeprefix("step-")) for path in self.whole_checkpoints()), default=0)

    def move(self) -> None:
        """To another directory, between two lives."""
        assert self.life is None
        if self.place.exists():
            target = self.place.with_name(f"{self.place.name}-moved")
            self.place.rename(target)
            self.place = target

    def expire(self) -> None:
        """Has the last sign of life be as old as another host waits for."""
        with closing(sqlite3.connect(self.journal)) as connection, connection:
            connection.execute("UPDATE lease SET heartbeat = heartbeat - ?", (2 * lock.EXPIRY,))

    def whole_checkpoints(self) -> list[Path]:
        """Those that are what the journal says of them, the oldest first."""
        if not self.journal.exists():
            return []
        digest = lineage.digest if self.scenario.engine == "scripted" else checkpoint.directory_digest
        with closing(schema.read_only(self.journal)) as connection:
            query = "SELECT checkpoint, digest FROM steps WHERE checkpoint IS NOT NULL ORDER BY step"
            named = [(self.checkpoints / name, found) for name, found in connection.execute(query)]
        return [path for path, expected in named if path.is_dir() and digest(path) == expected]

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(line for line in lines[-6:] if line.strip())[-600:]

    def close(self) -> None:
        if self.life is not None:
            self.kill()
        self._socket.close()
        self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
