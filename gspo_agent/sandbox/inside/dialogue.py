"""Questions to a running program, one at a time, and its answers: each a claim that is only passed on.

A question carries a random nonce that its answer must repeat, so that nothing sent ahead of a question can pass for the
answer to it; anything but exactly one answer ends the program.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from .frames import LENGTH, Incoming
from .streams import Streams
from .walls import Enclosure
from .watch import Watch

NONCE = 16
_CHUNK = 1 << 16  # more than 128 KB would be memory that the kernel maps anew for each answer
_GRACE = {"cpu_s": 0.3, "wall_s": 1.0}  # to heed an interrupt


class Job(Protocol):
    channel: socket.socket
    limits: dict[str, Any]
    enclosure: Enclosure

    def start(
        self, streams: Streams, body: Callable[[], int], ends: tuple[socket.socket, socket.socket] | None = None
    ) -> Watch: ...


class Dialogue:
    """The supervisor's side. `answer_all` runs inside the program."""

    def __init__(self, job: Job, answer_all: Callable[[Questions], None], *, shared: bool = True) -> None:
        """`shared`: standard output and standard error are one."""
        self.limits = job.limits
        self.streams = Streams(shared=shared)
        self.socket, far = socket.socketpair()
        self.socket.setblocking(False)
        self.watch = job.start(self.streams, lambda: _answer(answer_all), (self.socket, far))
        far.close()
        self.alive = True
        self.pid, self.cpu_s, self.wall_s = self.watch.pid, 0.0, 0.0
        self._nonce, self._received = b"", b""
        self._ready = False

    def ask(self, message: bytes) -> tuple[str, bytes]:
        """("ok", answer), or the limit that was passed, "killed" (by SIGKILL, which nothing here has sent), or
        "runtime_error": the program ended otherwise or broke the rules."""
        if not self.alive:
            return "runtime_error", b""
        if not self._ready:
            self.ready()
        self.watch.started = time.monotonic()
        self._received, self._ready = b"", False
        status = self._send(LENGTH.pack(NONCE + len(message)) + self._nonce + message)
        return self._hear() if status == "ok" else self._end(status)

    def ready(self) -> None:
        """Does ahead, while the program waits, what the next question would have to wait for."""
        self._nonce = os.urandom(NONCE)
        self.watch.begin()
        self._ready = True

    def interrupt(self) -> bool:
        """After a passed time limit: asks the program to stop (SIGINT); False when it had to be killed."""
        cpu_s, wall_s = self.cpu_s, self.wall_s
        os.kill(self.pid, signal.SIGINT)
        self.watch.limits = {**self.limits, **_GRACE}
        self.watch.begin()
        status, _ = self._hear()
        self.watch.limits = self.limits
        if status != "ok" and self.alive:
            self._end(status)
        self.cpu_s, self.wall_s = self.cpu_s + cpu_s, self.wall_s + wall_s
        return self.alive

    def close(self) -> None:
        """Ends the program and everything it started."""
        if self.alive:
            self._end("closed")
        self.streams.close()
        self.socket.close()

    def _send(self, data: bytes) -> str:
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                verdict = self.watch.wait(to_send=True)
                if verdict != "answer":
                    return "runtime_error" if verdict == "end" else verdict
            except OSError:
                return "runtime_error"
        return "ok"

    def _hear(self) -> tuple[str, bytes]:
        received = bytearray(self._received)
        while True:
            verdict = self.watch.wait()
            if verdict == "time_limit" and self.watch.interruptible:
                self._received = bytes(received)
                self._account()
                return verdict, b""
            if verdict != "answer":
                return self._end("runtime_error" if verdict == "end" else verdict)
            try:
                data = self.socket.recv(_CHUNK)
            except OSError:
                data = b""
            received += data
            if not data:
                return self._end("runtime_error")
            if len(received) < LENGTH.size:
                continue
            (length,) = LENGTH.unpack_from(received)
            if length > self.limits["result_bytes"]:
                return self._end("output_limit")
            missing = LENGTH.size + length - len(received)
            if missing <= 0:
                if missing or not received.startswith(self._nonce, LENGTH.size):
                    return self._end("runtime_error")
                self._account()
                return "ok", bytes(received[LENGTH.size + NONCE :])

    def _account(self) -> None:
        self.cpu_s = self.watch.own_cpu() - self.watch.cpu_started
        self.wall_s = time.monotonic() - self.watch.started

    def _end(self, status: str) -> tuple[str, bytes]:
        self._account()
        self.alive = False
        if status == "runtime_error" and self.watch.killed():
            status = "killed"
        self.watch.close()
        return status, b""


class Questions:
    """The program's side."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._incoming, self._nonce = Incoming(), b""

    def next(self) -> bytes | None:
        """Waits for a question; None when there will be no more."""
        try:
            frame = self._incoming.wait(self._channel)
        except EOFError:
            return None
        self._nonce = frame[:NONCE]
        return frame[NONCE:]

    def answer(self, message: bytes) -> None:
        self._channel.sendall(LENGTH.pack(NONCE + len(message)) + self._nonce + message)


def _answer(answer_all: Callable[[Questions], None]) -> int:
    answer_all(Questions(socket.socket(fileno=3)))
    return 0
