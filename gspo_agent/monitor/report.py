"""What `gspo-agent status` says: the journal, the record of the living process, and the directory, put together."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_agent.errors import JournalError
from gspo_agent.rollout.live import Live, read_live
from gspo_agent.rollout.owner import Owner
from gspo_agent.rollout.status import InFlight, RunStatus, read_status, waiting_lines

_SHORT_TIMEOUT = 0.2  # seconds to wait for a journal that somebody has for itself, where its process says as much
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Report:
    """A run from the outside, alive or not; `str()` is for a terminal."""

    directory: Path
    state: str
    """"running", "silent", "died", "stopped", "not begun", or "a copy"."""
    owner: Owner | None
    status: RunStatus | None
    """From the journal, or where that can't be read, what the process had read from it."""
    unreadable: str
    """Why the journal can't be read; "" where it can."""
    live: Live | None
    """The last record of the newest life."""
    disk: Mapping[str, tuple[int, int]]
    """Part of the directory -> (bytes, files)."""

    @property
    def in_flight(self) -> Sequence[InFlight]:
        """From the process while it lives, else what the journal would go on with."""
        if self.live is not None and (self.state in ("running", "silent") or self.unreadable):
            return self.live.in_flight
        return () if self.status is None else self.status.in_flight

    @property
    def at_most(self) -> int:
        """Tokens that a `kill -9` now would cost, at most; what is over can lose nothing more."""
        return self.live.loss.at_most if self.live is not None and self.state in ("running", "silent") else 0

    def text(self, everything: bool = False) -> str:
        """`everything`: a line for every episode in flight, not only for those that wait longest."""
        lines = [self._head()]
        if self.live is not None and self.state in ("running", "silent"):
            lines.append(f"doing: {self.live.phase}, for {self.live.phase_seconds:.0f} s")
            lines += [f"WARNING: {still}" for still in (*self.live.still, *self.live.remarks)]
        if self.status is not None:
            lines += self.status.lines()
        lines += waiting_lines(self.in_flight, None if everything else 5)
        lines += [f"a restart now would lose: {self._loss()}", *self._staleness()]
        lines.append("disk: " + ", ".join(f"{name} {_size(*size)}" for name, size in self.disk.items()))
        if self.unreadable:
            lines.append(f"the journal can't be read from here ({self.unreadable}); {self._instead()}")
        return "\n".join([*lines, *self._remedy()])

    def __str__(self) -> str:
        return self.text()

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        status, live = self.status, self.live
        return {
            "directory": str(self.directory),
            "state": self.state,
            "owner": self.owner,
            "step": None if status is None else status.step,
            "checkpoint": None if status is None or status.last is None else status.last.checkpoint,
            "groups": {} if status is None else status.groups,
            "episodes": {} if status is None else status.slots,
            "retries": {} if status is None else status.retries,
            "failures": {} if status is None else status.failures,
            "counted": {} if status is None else status.counted,
            "given_up": [] if status is None else [group._asdict() for group in status.given_up],
            "metrics": {} if status is None or status.last is None else status.last.metrics,
            "in_flight": [episode._asdict() for episode in self.in_flight],
            "restart_loses": {"stop": 0, "kill_at_most": self.at_most},
            "staleness": dict(self._histograms()),
            "disk": {name: {"bytes": size, "files": files} for name, (size, files) in self.disk.items()},
            "unreadable": self.unreadable,
            "live": None if live is None else {
                "seen": live.owner.seen,
                "phase": live.phase,
                "phase_seconds": live.phase_seconds,
                "loss": live.loss._asdict(),
                "failures": live.failures,
                "restarts": live.restarts,
                "tokens": live.tokens,
                "still": live.still,
                "remarks": live.remarks,
            },
        }  # fmt: skip

    def _head(self) -> str:
        head = f"{self.directory}: {self.state.replace('stopped', 'not running')}"
        if self.owner is None:
            return head
        head += f", life {self.owner.life}"
        if self.status is not None:
            last = self.status.last
            head += f", step {self.status.step}" + (f" (checkpoint {last.checkpoint})" if last else "")
        ago = max(0.0, time.time() - self.owner.seen)
        where = f"pid {self.owner.pid} on {self.owner.host}"
        if self.state == "stopped":
            return f"{head}; {where} stopped {_ago(ago)}"
        return f"{head}; {where}, last sign of life {_ago(ago)}"

    def _loss(self) -> str:
        loss = None if self.live is None else self.live.loss
        if self.state in ("running", "silent"):
            if loss is None:
                return "0 tokens after Ctrl-C or SIGTERM; the process does not say what a kill -9 would cost"
            return (
                f"0 tokens after Ctrl-C or SIGTERM; at most {loss.at_most} tokens after kill -9 "
                f"({loss.requests} running requests, {loss.sampled} tokens not journaled at the last look)"
            )
        if self.state == "died" and loss is not None:
            return f"0 tokens (its end has cost at most {loss.at_most}: {loss.requests} requests ran at the last look)"
        return "0 tokens"

    def _histograms(self) -> Iterator[tuple[str, Mapping[int, int]]]:
        if self.status is not None:
            yield from self.status.staleness.items()
        if self.live is not None and self.state in ("running", "silent"):
            yield "in flight", self.live.staleness

    def _staleness(self) -> Iterator[str]:
        for name, histogram in self._histograms():
            total = sum(histogram.values())
            if total:
                shares = ", ".join(f"{lag}: {tokens} ({tokens / total:.0%})" for lag, tokens in histogram.items())
                yield f"age of tokens in steps, {name}: {shares}"

    def _instead(self) -> str:
        if self.live is None:
            return "and no living process has left a record"
        if self.status is None:
            return "its process has not read it yet either"
        return f"this is what its process read {_ago(time.time() - self.live.ledger_at)}"

    def _remedy(self) -> list[str]:
        go_on = f"gspo-agent resume {shlex.quote(str(self.directory))}"
        if self.state in ("running", "silent") and self.owner is not None:
            stop = f"kill {self.owner.pid}" if self.owner.host == socket.gethostname() else (
                f"kill {self.owner.pid} on {self.owner.host}"
            )  # fmt: skip
            return [f"to stop it: Ctrl-C there, or {stop}; then {go_on} goes on"]
        if self.state == "a copy" and self.live is not None:
            there = f"{Path(self.live.journal).parent} on {self.live.owner.host}"
            return [f"a copy of {there}; {go_on} goes on from what was copied"]
        return [f"to go on: {go_on}"]


def read_report(directory: Path, journal: Path) -> Report:
    """Everything that can be told about a run, whatever of it can be read. Needs no lock and writes nothing."""
    live, unreadable, status = read_live(directory), "", None
    try:
        status = read_status(journal, None if live is None else _SHORT_TIMEOUT)
    except JournalError as error:
        unreadable = str(error) if journal.exists() else ""
    if live is not None and status is not None and live.owner.life < status.owner.life:
        live = None  # of an earlier life; the newest has written none yet
    if status is None and live is not None:
        status = live.ledger
    owner = _newest(status, live, bool(unreadable))
    state, disk = _state(journal, owner, live), disk_use(directory, journal)
    return Report(directory, state, owner, status, unreadable, live, disk)


def _newest(status: RunStatus | None, live: Live | None, unreadable: bool) -> Owner | None:
    """The later sign of life; that it ended is the journal's word, while it can be read."""
    if live is None:
        return None if status is None else status.owner
    if status is None or unreadable:
        return live.owner
    return max(status.owner, live.owner, key=lambda owner: (owner.ended, owner.seen))


def _state(journal: Path, owner: Owner | None, live: Live | None) -> str:
    if owner is None or not owner.life:
        return "not begun"
    if live is not None and live.owner.host == socket.gethostname() and not owner.ended:
        file = journal.stat() if journal.exists() else None
        if file is not None and live.inode != (file.st_dev, file.st_ino):
            return "a copy"
    return owner.state(journal)


def disk_use(directory: Path, journal: Path) -> dict[str, tuple[int, int]]:
    """Part -> (bytes, files); a file that goes away meanwhile counts as gone."""
    parts = {"journal": [journal, journal.with_name(journal.name + "-wal")]}
    parts |= {name: [directory / name] for name in ("blobs", "checkpoints", "episodes", "model")}
    found = {name: _measure(paths) for name, paths in parts.items()}
    return {name: size for name, size in found.items() if size[1]}


def _measure(paths: Sequence[Path]) -> tuple[int, int]:
    total = files = 0
    pending = [str(path) for path in paths]
    while pending:
        path = pending.pop()
        try:
            if os.path.isdir(path):
                pending += [entry.path for entry in os.scandir(path)]
            else:
                total, files = total + os.stat(path).st_size, files + 1
        except OSError:
            continue
    return total, files


def _size(total: float, files: int) -> str:
    unit = 0
    while total >= 1000 and unit < len(_UNITS) - 1:
        total, unit = total / 1000, unit + 1
    return f"{total:.{1 if unit > 1 else 0}f} {_UNITS[unit]}" + (f" in {files} files" if files > 2 else "")


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
