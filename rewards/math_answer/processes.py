"""The processes that workers are, from the outside: started by a server of their own, asked, watched and killed.

A process of the trainer's size takes milliseconds to start another, and on a busy machine many, while none of its
threads goes on. So it starts one, and that one starts the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rewards.math_answer.verdict import OPTIONS, Options, Verdict

_ROOT = Path(__file__).parents[2]
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_SEND_SECONDS = 10.0
_END_SECONDS = 10.0
_NO_SERVER = "the process that starts them does not answer, or has ended; is sympy installed?"


class TooMuchWork(Exception):
    """An answer took a worker longer than it may."""


class WorkerServer:
    """A fresh interpreter with an empty environment that forks workers; it and they end with this process."""

    def __init__(self) -> None:
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_SEND_SECONDS)
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-m", "rewards.math_answer.worker"],
                cwd="/",
                env={
                    "PYTHONPATH": str(_ROOT),
                    "PYTHONHASHSEED": "0",
                    "SYMPY_GROUND_TYPES": "python",
                    "MPMATH_NOGMPY": "1",
                },
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def worker(self, kind: str) -> Worker:
        """A new one of this kind, not waited for. Raises OSError where the server is gone."""
        near, far = socket.socketpair()
        with far:
            try:
                socket.send_fds(self._control, [kind.encode()], [far.fileno()])
            except OSError:
                near.close()
                raise OSError(_NO_SERVER) from None
        return Worker(near, kind)

    def end(self) -> None:
        """Ends it; its workers end by their own handles."""
        self._process.kill()
        self._process.wait()
        self._control.close()

    def forget(self) -> None:
        """Lets go of a process that is another process's child."""
        self._process.returncode = 0
        self._control.close()


class Worker:
    """One process that judges one answer after another.

    Args:
        channel: To it, and back.
        kind: "parser", "sympy" or "math-verify"
    """

    def __init__(self, channel: socket.socket, kind: str) -> None:
        self._channel, self.kind = channel, kind
        self.pid: int | None = None
        """Known once it is ready."""
        self.jobs = 0
        self._handle = -1
        self._used = 0.0
        self._said = b""

    def get_ready(self, seconds: float) -> None:
        """Waits for what its server loads first. Raises OSError where it does not start within `seconds`."""
        if self.pid is not None:
            return
        self._channel.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            said, handles, _, _ = socket.recv_fds(self._channel, 64, 1)
            if handles:
                (self._handle,), self.pid = handles, int(said)
        if self.pid is None:
            raise OSError(_NO_SERVER)

    def ask(self, text: str, gold: str, options: Options, cpu_s: float, wall_s: float) -> Verdict | None:
        """Its verdict; None where it has ended. Raises TooMuchWork, or TimeoutError where it got too little time."""
        self.jobs += 1
        until, most, work = time.monotonic() + wall_s, self._used + cpu_s, cpu_s
        job = {"text": text, "gold": gold, "options": [getattr(options, name) for name in OPTIONS], "cpu_s": cpu_s}
        self._channel.settimeout(wall_s)
        self._channel.sendall(json.dumps(job).encode() + b"\n")
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                return self._verdict(min(left, max(work, _TICK)))
            work = most - self._cpu_seconds()
            if work <= 0:
                raise TooMuchWork
        raise TimeoutError

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) * _TICK

    def _verdict(self, seconds: float) -> Verdict | None:
        self._channel.settimeout(seconds)
        while not self._said.endswith(b"\n"):
            piece = self._channel.recv(1 << 16)
            if not piece:
                return None
            self._said += piece
        said, self._said = json.loads(self._said), b""
        self._used = said["used"]
        return Verdict(**said["verdict"])

    @property
    def ended(self) -> bool:
        return self._has_ended(0)

    def kill(self) -> None:
        """Whoever waits for its answer sees the end of it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._has_ended(_END_SECONDS)
        self.forget()

    def forget(self) -> None:
        """Lets go of a process that is another process's."""
        self._channel.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _has_ended(self, seconds: float) -> bool:
        if self._handle < 0:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(1000 * seconds))
