"""A job's pid 1: trusted, and deaf to signals from inside. When it ends, the kernel ends everything in the job.

It builds the job's own mount and ipc namespace, starts programs that drop every right before untrusted code runs,
watches them, and reports on the job's channel. It never interprets what a program says; it only measures and relays.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from . import calls, frames, linux, program, repl
from .dialogue import Dialogue
from .seccomp import Filter
from .streams import Streams
from .watch import HungUp, Watch

_DIRECTORIES = ("/box/work", "/box/tmp")
_MAX_CRASHES = 3  # of one batch of calls; what is left then gets the last verdict instead of another try

# Answers of calls are held back together for so long: waking the trainer costs more than a call.
_HOLD_BYTES, _HOLD_S = 1 << 16, 0.05


def supervise(channel: socket.socket, slot: int, seccomp: Filter) -> None:
    """Serves the one request that comes on `channel`; returns when it is answered or nobody waits for it."""
    gc.disable()
    channel.setblocking(True)
    try:
        request, blobs = frames.receive(channel)
        job = _Job(channel, slot, seccomp, request["limits"])
        job.isolate()
        {"run": job.run, "call": job.call, "session": job.session}[request["kind"]](request, blobs)
    except (HungUp, EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        channel.sendall(frames.pack({"status": "infra_error", "reason": f"{type(error).__name__}: {error}"}))


class _Job:
    def __init__(self, channel: socket.socket, slot: int, seccomp: Filter, limits: dict[str, Any]) -> None:
        self.channel, self.slot, self.seccomp, self.limits = channel, slot, seccomp, limits

    def isolate(self) -> None:
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        linux.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")
        os.umask(0)
        self.fresh_disk()

    def fresh_disk(self) -> None:
        options = f"size={self.limits['disk_bytes']},nr_inodes={self.limits['files'] + 3},mode=0755"
        linux.mount("tmpfs", "/box", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
        for path in _DIRECTORIES:
            os.mkdir(path, 0o1777)

    def start(self, streams: Streams, body: Callable[[], int], answers: socket.socket | None = None) -> int:
        """Forks a program; `body` runs in it, after every right was dropped, and returns its exit code."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                program.confine(self.limits, self.slot, self.seccomp, streams.fds, answers)
                code = body()
            finally:
                os._exit(code)
        return pid

    def run(self, request: dict[str, Any], blobs: list[bytes]) -> None:
        """blobs: the code, then one standard input for each run; one frame is sent for each."""
        code, *stdins = blobs
        for position, stdin in enumerate(stdins):
            if position and any(os.listdir(path) for path in _DIRECTORIES):
                linux.umount("/box")
                self.fresh_disk()
            started = time.monotonic()
            streams = Streams(stdin)
            watch = Watch(self.start(streams, lambda: program.run(code)), self.channel, None, self.limits)
            verdict = watch.wait()
            header = self.outcome(verdict, watch.close(), watch.exit_code, streams)
            header["wall_s"] = time.monotonic() - started
            self.channel.sendall(frames.pack(header, *streams.read(self.limits["output_bytes"])))
            streams.close()

    def outcome(self, verdict: str, cpu_s: float, exit_code: int | None, streams: Streams) -> dict[str, Any]:
        if verdict == "end":
            if streams.full(self.limits["output_bytes"]):
                verdict = "output_limit"
            elif cpu_s > self.limits["cpu_s"] or exit_code == -signal.SIGXCPU:
                verdict = "time_limit"
            else:
                verdict = program.EXIT_STATUS.get(exit_code or 0, "runtime_error" if exit_code else "ok")
        shown = 1 if exit_code in program.EXIT_STATUS else exit_code
        return {"status": verdict, "cpu_s": cpu_s, "exit_code": shown}

    def call(self, request: dict[str, Any], blobs: list[bytes]) -> None:
        """blobs: the code, then the encoded arguments of each call; one frame is sent for each call.

        All calls are made in one process, as long as it lives; after a crash or a limit the next call gets a new one.
        """
        code, *arguments = blobs
        opening = json.dumps({"function": request["function"], "cls": request["cls"]}).encode() + b"\n" + code
        dialogue: Dialogue | None = None
        tries, answer = _MAX_CRASHES, b""
        header: dict[str, Any] = {}
        held, sent = b"", time.monotonic()
        for encoded in arguments:
            if tries:
                loaded = True
                if dialogue is None:
                    dialogue = Dialogue(self, calls.answer_calls)
                    status, answer = dialogue.ask(opening)
                    loaded = status == "ok" and not answer
                if loaded:
                    status, answer = dialogue.ask(encoded)
                header = {"status": status, "cpu_s": dialogue.cpu_s, "wall_s": dialogue.wall_s}
                if not (loaded and dialogue.alive):
                    dialogue.close()
                    # code that does not load will not load the next time either
                    dialogue, tries = None, tries - 1 if loaded else 0
            held += frames.pack(header, answer)
            if len(held) > _HOLD_BYTES or time.monotonic() - sent > _HOLD_S:
                self.channel.sendall(held)
                held, sent = b"", time.monotonic()
        if dialogue:
            dialogue.close()
        self.channel.sendall(held)

    def session(self, request: dict[str, Any], blobs: list[bytes]) -> None:
        """blobs: nothing; every further frame is a cell, and one frame answers it."""
        repl.serve_session(self)
