"""A job's first process: trusted. When it ends, the kernel ends everything in the job.

It builds the job's enclosure, starts programs that drop every right before untrusted code runs,
watches them, and reports on the job's channel. It never interprets what a program says; it only measures and relays.

After runs of which it has seen nothing but numbers (how they ended, how long they took and how much they printed) it
serves another job, in an enclosure that is made anew.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from . import calls, command, frames, program, repl, tree
from .contents import Compiled, Request, relay
from .dialogue import Dialogue
from .streams import Streams
from .walls import Enclosure
from .watch import HungUp, Watch

_MAX_CRASHES = 3  # of one batch of calls; what is left then gets the last verdict instead of another try

_ORDINARY = (0, 1, program.COMPILE_ERROR)  # exit codes; any other number would be a message to the next job

# Answers of calls are held back together for so long: waking the trainer costs more than a call.
_HOLD_BYTES, _HOLD_S = 1 << 16, 0.05


def supervise(channel: socket.socket, enclosure: Enclosure) -> None:
    """Serves requests that come on `channel`, one after the other; returns when nobody waits for an answer, after a job
    that leaves this process unfit for another, or when none comes for a while."""
    gc.disable()
    channel.setblocking(True)
    try:
        while _serve(channel, enclosure) and _asked_again(channel):
            pass
    except (HungUp, EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        channel.sendall(frames.pack({"status": "infra_error", "reason": f"{type(error).__name__}: {error}"}))
    finally:
        enclosure.close()


def _serve(channel: socket.socket, enclosure: Enclosure) -> bool:
    """Whether this process has kept nothing of the job."""
    request = Request(channel)
    job = _Job(channel, enclosure, request.header["limits"])
    enclosure.build(job.limits)
    kind = request.header["kind"]
    if kind == "run":
        spotless = job.run(request.blobs)
        request.close()
        return spotless
    serve = {
        "call": job.call,
        "session": job.session,
        "exchange": job.exchange,
        "command": job.command,
        "tree": job.tree,
    }[kind]
    serve(request.header, [bytes(blob) for blob in request.blobs])
    return False


def _asked_again(channel: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    return bool(waiting.poll(frames.IDLE_S * 1000))


class _Job:
    def __init__(self, channel: socket.socket, enclosure: Enclosure, limits: dict[str, Any]) -> None:
        self.channel, self.enclosure, self.limits = channel, enclosure, limits
        self.kernel_limits: list[tuple[int, int]] = []

    def start(
        self,
        streams: Streams,
        body: Callable[[], int],
        ends: tuple[socket.socket, socket.socket] | None = None,
        kept: int | None = None,
    ) -> Watch:
        """Forks a program; `body` runs in it, after every right was dropped, and returns its exit code.

        Args:
            ends: of the socket of a dialogue, this side's and the program's.
            kept: a file that the program has besides its streams, where it has no dialogue.
        """
        near, far = ends or (None, None)
        if not self.kernel_limits:
            count = self.enclosure.own_count
            self.kernel_limits = program.kernel_limits(self.limits, whole_run=ends is None, own_count=count)
        watch = Watch(self.channel, near, self.limits, self.enclosure)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                kept = far.detach() if far else kept
                program.confine(self.kernel_limits, self.enclosure, streams.fds, kept, whole_run=ends is None)
                code = body()
            finally:
                os._exit(code)
        watch.follow(pid)
        self.enclosure.started(pid)
        return watch

    def run(self, blobs: list[memoryview]) -> bool:
        """blobs: the code, then one standard input for each run; one frame is sent for each.

        Whether this process has learnt no more of the programs than numbers: the last frame says so.
        """
        code, *stdins = blobs
        compiled = Compiled(self.limits["output_bytes"]) if len(stdins) > 1 else None
        spotless = True
        for position, stdin in enumerate(stdins, 1):
            if position > 1:
                self.enclosure.renew()
            started = time.monotonic()
            streams = Streams(stdin)
            kept = compiled.file if compiled else None
            watch = self.start(streams, lambda: program.run(code, compiled), kept=kept)
            verdict = watch.wait()
            header = self.outcome(verdict, watch.close(), watch.exit_code, streams)
            if compiled:
                compiled.seal()
            header["wall_s"] = time.monotonic() - started
            # Whoever looks after a program reads the names it gives itself.
            spotless = spotless and watch.exit_code in _ORDINARY and verdict == "end" and not watch.looked
            if position == len(stdins):
                spotless = header["stays"] = spotless and self.enclosure.vacate()
            relay(self.channel, header, streams.fds[1:], self.limits["output_bytes"])
            streams.close()
        if compiled:
            compiled.close()
        return spotless

    def outcome(self, verdict: str, cpu_s: float, exit_code: int | None, streams: Streams) -> dict[str, Any]:
        if verdict == "end":
            if streams.full(self.limits["output_bytes"]):
                verdict = "output_limit"
            elif cpu_s > self.limits["cpu_s"] or exit_code == -signal.SIGXCPU:
                verdict = "time_limit"
            else:
                verdict = program.EXIT_STATUS.get(exit_code or 0, "runtime_error" if exit_code else "ok")
                verdict = "killed" if exit_code == -signal.SIGKILL else verdict
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

    def exchange(self, request: dict[str, Any], blobs: list[bytes]) -> None:
        """blobs: nothing; every further frame is a question to the side of a test file that this job is."""
        from .exchange import serve_exchange  # loaded by the fork servers that have what tests need

        serve_exchange(self, request["side"])

    def command(self, request: dict[str, Any], blobs: list[bytes]) -> None:
        """blobs: a workspace's files, and what to run in it."""
        command.serve_command(self, request, blobs)

    def tree(self, request: dict[str, Any], blobs: list[bytes]) -> None:
        """blobs: nothing; one frame is sent, the files below a directory of the image that the server runs in."""
        found, left_out = tree.read(request["directory"], self.limits["disk_bytes"], self.limits["files"])
        header = {"status": "ok", "left_out": left_out, "commit": tree.commit(request["directory"])}
        self.channel.sendall(frames.pack(header, tree.pack(found)))
