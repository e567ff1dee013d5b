"""Roster: the servers of a fleet, who among them may be asked, and who waits for that."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator

from gspo_agent.engine.call import Call
from gspo_agent.engine.worker import State, Worker

_log = logging.getLogger(__name__)
_HOMES = 1 << 17


class Roster:
    """Changes between two awaits only: what is chosen may be asked."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.paused = False
        self.waiting: set[Call] = set()
        """Calls that wait until somebody can be asked."""
        self._homes: OrderedDict[str, Worker] = OrderedDict()
        self._changed = asyncio.Event()

    @property
    def serving(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.state is not State.OUT]

    def calls(self) -> Iterator[Call]:
        """In flight, at any server."""
        for worker in self.workers:
            yield from worker.calls

    def problems(self) -> str:
        """Who is out, and why."""
        return "; ".join(f"{url}: {problem}" for url, problem in self.out().items()) or "no server is known"

    def out(self) -> dict[str, str]:
        """Address -> why nothing is asked there."""
        return {worker.url: worker.problem for worker in self.workers if worker.state is State.OUT}

    def choose(self, session: str, avoid: Worker | None = None) -> Worker | None:
        """The server that has the session's prefix, else the one with the fewest requests. None: wait."""
        home = self._homes.get(session)
        if home is None or home is avoid or home.state is State.OUT:
            serving = self.serving
            others = [worker for worker in serving if worker is not avoid] or serving
            if home not in others:
                home = min(others, key=lambda worker: len(worker.calls), default=None)
        if self.paused or home is None or home.state is not State.SERVING:
            return None
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        return home

    def suspect(self, worker: Worker, problem: str) -> None:
        """Nobody asks it, nor whoever is behind the same router, until a look found it well."""
        for other in self._beside(worker):
            self._take_out(other, problem)
        self.check(worker)

    def check(self, worker: Worker) -> None:
        """Has it looked at now, and whoever is behind the same router, which does not say who failed."""
        for other in self._beside(worker):
            other.wanted.set()

    def _beside(self, worker: Worker) -> list[Worker]:
        return [other for other in self.workers if other.entry == worker.entry]

    def _take_out(self, worker: Worker, problem: str) -> None:
        if worker.state is not State.OUT:
            _log.warning("%s gets no requests: %s", worker.url, problem)
        worker.state, worker.problem = State.OUT, problem
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        for call in self.waiting:
            call.wake()

    def _serve(self, worker: Worker) -> None:
        """From now on it may be asked, unless it has left."""
        if worker in self.workers:
            worker.state, worker.problem = State.SERVING, ""
            self._wake()
