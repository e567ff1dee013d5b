"""One running program under its limits, watched from outside of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any

from .walls import Enclosure

TICK_MS = 50
_MAX_STARVATION = 4  # times the wall limit that a job may spend waiting for a processor
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class HungUp(Exception):
    """The trainer closed the job's channel: nobody wants the result."""


class Watch:
    """Waits for a program's end or its answer, at most as long as the limits allow.

    Time is CPU time of the whole tree, read from the kernel; the clock on the wall counts only less what the program
    spent waiting for a free processor. Nothing the program does to its own clocks matters.
    """

    def __init__(
        self,
        channel: socket.socket,
        answers: socket.socket | None,
        limits: dict[str, Any],
        enclosure: Enclosure,
    ) -> None:
        self.limits, self.enclosure = limits, enclosure
        self.interruptible = False
        self.looked = False  # whether what the kernel says of the program was read, names that it has chosen among it
        self.exit_code: int | None = None
        self.channel_fd, self.answers_fd = channel.fileno(), answers.fileno() if answers else -1
        self.poll = select.poll()
        self.poll.register(self.channel_fd, 0)
        if answers:
            self.poll.register(self.answers_fd, select.POLLIN)
        self.pid, self.handle = 0, -1
        self.started, self.cpu_started = time.monotonic(), 0.0
        self.tree_base: float | None = 0.0
        self.delays: dict[str, float] | None = {}  # a new program has used nothing, and not waited yet

    def follow(self, pid: int) -> None:
        """Little, as the pages that are written now would have to be copied: the program still has them too."""
        self.pid, self.handle = pid, os.pidfd_open(pid)
        self.poll.register(self.handle, select.POLLIN)

    def begin(self) -> None:
        """Limits count from here: one run, one call, one cell."""
        self.started = time.monotonic()
        self.cpu_started = self.own_cpu()
        self.tree_base = self.delays = None

    def wait(self, *, to_send: bool = False) -> str:
        """ "answer" (or room for a question, with `to_send`), "end", or the limit that was passed."""
        if to_send:
            self.poll.modify(self.answers_fd, select.POLLOUT)
        try:
            return self._wait()
        finally:
            if to_send:
                self.poll.modify(self.answers_fd, select.POLLIN)

    def _wait(self) -> str:
        while True:
            events = self.poll.poll(TICK_MS)
            ready = [fd for fd, _ in events]
            if self.channel_fd in ready:
                raise HungUp
            if self.answers_fd in ready:
                return "answer"
            if self.handle in ready:
                return "end"
            passed = self.passed()
            if passed:
                return passed

    def passed(self) -> str | None:
        """The limit that is passed by now."""
        elapsed = time.monotonic() - self.started
        cpu, memory = self.tree()
        if self.tree_base is None:
            self.tree_base = cpu - (self.own_cpu() - self.cpu_started)
        if self.delays is None:
            self.delays = self._delays()
        if cpu - self.tree_base > self.limits["cpu_s"]:
            return "time_limit"
        if memory > self.limits["memory_bytes"]:
            return "memory_limit"
        if self.enclosure.overdrawn():
            return "runtime_error"
        if elapsed > self.limits["wall_s"]:
            if elapsed - self.starved() > self.limits["wall_s"]:
                return "time_limit"
            if elapsed > _MAX_STARVATION * self.limits["wall_s"]:
                return "infra_error"
        return None

    def own_cpu(self) -> float:
        """CPU seconds of the first process (its CPU-time clock)."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return 0.0

    def tree(self) -> tuple[float, int]:
        """CPU seconds and bytes of every process of the job."""
        self.looked = True
        cpu, held = 0, {}
        for pid in self.enclosure.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                cpu += sum(map(int, fields[11:15]))
                held[pid] = int(fields[21]) * _PAGE
        resident = sum(held.values())
        if resident > self.limits["memory_bytes"]:
            resident = sum(_proportional(pid, otherwise=size) for pid, size in held.items())
        return cpu / _TICKS_PER_S, resident

    def starved(self) -> float:
        """Seconds of this run, call or cell that the program's threads were ready and had no processor, the worst of
        them. What they waited before it is no excuse: it may have been for processes of the program's own."""
        before = self.delays or {}
        return max((delay - before.get(task, 0.0) for task, delay in self._delays().items()), default=0.0)

    def _delays(self) -> dict[str, float]:
        """Of each thread, since it began."""
        found: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError):
            for task in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{task}/schedstat") as file:
                    found[task] = int(file.read().split()[1]) / 1e9
        return found

    def killed(self) -> bool:
        """Whether SIGKILL has ended the first process, before `close` does: it itself, or the machine. What closed its
        descriptors is about to end, and gets a moment for that."""
        select.select([self.handle], [], [], TICK_MS / 1000)
        ended = os.waitid(os.P_PIDFD, self.handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return ended is not None and (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGKILL)

    def close(self) -> float:
        """Kills whatever is left of the job's processes and waits until they are gone; CPU seconds they used."""
        os.close(self.handle)
        self.enclosure.signal(signal.SIGKILL)
        used = 0.0
        while True:
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                return used
            used += usage.ru_utime + usage.ru_stime
            if pid == self.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)


def _proportional(pid: str, otherwise: int) -> int:
    """Bytes, with a page that n processes share counted as 1/n in each (PSS), where that may be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    except PermissionError:  # it has an id of its own, and this is no root that may look into everything
        return otherwise
    except OSError:
        return 0
