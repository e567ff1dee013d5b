"""Starts the fork server, proves that it isolates, and hands out channels to new jobs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_agent import mounts
from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import container, probe
from gspo_agent.sandbox.inside import frames
from gspo_agent.sandbox.probe import NotIsolated
from gspo_agent.sandbox.settings import Backend, SandboxSettings

_log = logging.getLogger(__name__)
PREFERRED: tuple[Backend, ...] = ("ns", "landlock")

_PACKAGE = Path(__file__).parent
# The directory goes through the socket: an argument or a variable could be read by the jobs.
_BOOT = (
    "import os, sys; sys.path.insert(0, os.read(0, 4096).decode()); "
    "from inside import forkserver; del sys.path[0]; forkserver.main()"
)
_FLAGS = ("-s", "-S", "-P", "-X", "utf8", "-X", "int_max_str_digits=0")
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
_START_S = 30.0
_LAST_S = 1.0  # that a server which has closed its socket may take to end
_SEND_S = 10.0
_OTHER_PYTHON = "name a Python 3.11 or newer as [sandbox] python"
_STOP_MS = 10_000  # files that many jobs left may take a while to remove


class ForkServer:
    """A running fork server; it and everything in it ends with this process, with `close`, or with this object."""

    def __init__(
        self, settings: SandboxSettings, packages: Sequence[str] = (), sites: Sequence[str] | None = ()
    ) -> None:
        """Waits until the server is up and no probe got out; NotIsolated with the failed step and the remedy.

        Args:
            settings: name one backend; `choose` knows what "auto" means.
            packages: directories of packages that its jobs may import, beside the standard library.
            sites: directories full of such packages; None: the interpreter's own.
        """
        self.backend = settings.backend
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"the sandbox needs Linux (namespaces and seccomp); this is {sys.platform}")
        self._code, self._packages, self._scratch = str(_PACKAGE), list(packages), tempfile.gettempdir()
        self._sites = None if sites is None else list(sites)
        self._trainer: int | None = os.getpid()
        remove: list[str] = []
        if self.backend == "container":
            self._control, self._process, remove = container.start(settings, packages, [*_FLAGS, "-c", _BOOT])
            self._code, self._scratch, self._trainer = container.CODE, "/tmp", None
            self._packages = [f"{container.PACKAGES}/{os.path.basename(path)}" for path in packages]
        else:
            if self.backend != "ns":
                _check_local(self.backend, self._scratch)
            self._control, self._process = _start(self.backend, settings.interpreter)
        self._owner = os.getpid()
        self._jobs: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._idle: list[tuple[float, socket.socket]] = []  # since when; the longest idle first
        self._keeping = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._control, self._process, self._owner, remove, self._idle)
        try:
            hello = self._hello()
            self.own_uids, self.shell = bool(hello["own_uids"]), bool(hello["shell"])
            if self.backend == "unsafe":
                _log.warning('sandbox.backend = "unsafe": code of models runs unconfined, as user %d', os.getuid())
            else:
                self._probe(hello["canary"])
        except BaseException:
            self.close()
            raise
        self._control.settimeout(_SEND_S)

    @property
    def pid(self) -> int:
        """The launcher's process id; the server and its jobs are below it."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether new jobs can be started, from this process."""
        return self._finalizer.alive and os.getpid() == self._owner and self._process.poll() is None

    def spawn(self) -> socket.socket:
        """A channel to the supervisor of a new job; closing it ends the job. OSError when the server is gone,
        SandboxError when this process can have no more channels."""
        try:
            near, far = socket.socketpair()
        except OSError as error:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise SandboxError(
                f"no job can be started: {error.strerror}. This process may have {most} files open, and every job and "
                "session is one: raise it (ulimit -n), or play fewer episodes at once (rollout.max_in_flight)"
            ) from None
        with far:
            try:
                socket.send_fds(self._control, [b"job"], [far.fileno()])
            except OSError:
                near.close()
                raise
        self._jobs.add(near)
        return near

    def keep(self, channel: socket.socket, most: int) -> None:
        """Takes the channel of a supervisor that has answered all of its job and waits for another one; closes it where
        `most` do already, or where it is another server's."""
        now = time.monotonic()
        with self._keeping:
            while self._idle and self._idle[0][0] < now - frames.IDLE_S:
                self._idle.pop(0)[1].close()
            if self._finalizer.alive and channel in self._jobs and len(self._idle) < most:
                self._idle.append((now, channel))
            else:
                channel.close()

    def idle(self) -> socket.socket | None:
        """The channel of a supervisor that waits for another job, if any does; it may end any moment."""
        with self._keeping:
            while self._idle:
                _, channel = self._idle.pop()
                try:
                    channel.recv(1, socket.MSG_PEEK)
                except BlockingIOError:
                    return channel
                except OSError:
                    pass
                channel.close()  # it has ended, or says what nobody asked for
        return None

    @property
    def busy(self) -> bool:
        """Whether one of its channels is still open, without those that `idle` would give."""
        return sum(job.fileno() >= 0 for job in list(self._jobs)) > len(self._idle)

    def close(self) -> None:
        """Ends the server and every job."""
        self._finalizer()

    def _hello(self) -> dict[str, Any]:
        self._control.settimeout(_START_S)
        begun = time.monotonic()
        hello: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            self._control.send(self._code.encode())
            wanted = {
                "trainer": self._trainer,
                "backend": "landlock" if self.backend == "container" else self.backend,
                "packages": self._packages,
                "sites": self._sites,
                "scratch": self._scratch,
            }
            self._control.send(json.dumps(wanted).encode())
            hello = json.loads(self._control.recv(1 << 16) or b"{}")
        if "ready" not in hello:
            if "error" not in hello:
                what = f"the fork server did not start: {self._last_words(begun)}"
                raise NotIsolated(self.backend, what, _OTHER_PYTHON)
            raise NotIsolated(self.backend, hello["error"], hello.get("remedy"))
        assert self._process.stderr is not None
        self._process.stderr.close()
        return hello

    def _last_words(self, begun: float) -> str:
        assert self._process.stderr is not None
        late = time.monotonic() - begun >= _START_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if late else _LAST_S)
        self._process.kill()
        status = self._process.wait()
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        if lines or late:
            return lines[-1] if lines else f"no answer within {_START_S:g} s"
        return "it was killed meanwhile" if status < 0 else f"it ended with status {status}"

    def _probe(self, canary: str | None) -> None:
        code, stdin, limits = probe.program(canary)
        with self.spawn() as channel:
            channel.settimeout(_START_S)
            channel.sendall(frames.pack({"kind": "run", "limits": limits.as_dict()}, code, stdin))
            try:
                header, blobs = frames.receive(channel)
            except (OSError, EOFError) as error:
                raise NotIsolated(self.backend, f"the first job was lost ({error or 'closed channel'})") from None
        probe.judge(self.backend, header, *blobs)


def _check_local(backend: Backend, scratch: str) -> None:
    """Another host would take the files of these jobs for leftovers, and may know neither their ids nor their locks."""
    if mounts.on_network(Path(scratch)):
        raise NotIsolated(
            backend,
            f"{scratch}, where jobs have their files, is on a network file system",
            "set TMPDIR to a directory of this machine, as in TMPDIR=/var/tmp or TMPDIR=/dev/shm",
        )


def _start(backend: Backend, interpreter: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with far:
            process = subprocess.Popen(
                [interpreter, *_FLAGS, "-c", _BOOT],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        control.close()
        what = f"{interpreter} cannot be run: {error.strerror}"
        raise NotIsolated(backend, what, _OTHER_PYTHON) from None
    return control, process


def choose(settings: SandboxSettings, packages: Sequence[str] = (), sites: Sequence[str] | None = ()) -> ForkServer:
    """The server of the named backend, or of the first that holds here; SandboxError names what failed of each."""
    if settings.backend != "auto":
        return ForkServer(settings, packages, sites)
    refused: list[NotIsolated] = []
    for backend in PREFERRED:
        try:
            return ForkServer(replace(settings, backend=backend), packages, sites)
        except NotIsolated as error:
            refused.append(error)
    raise NotIsolated(
        " or ".join(error.backend for error in refused),
        "; ".join(f"{error.backend}: {error.what}" for error in refused),
        "; or ".join(f"for {error.backend}: {error.remedy}" for error in refused),
    )


def _stop(
    control: socket.socket,
    process: subprocess.Popen[bytes],
    owner: int,
    remove: list[str],
    idle: list[tuple[float, socket.socket]],
) -> None:
    control.close()
    while idle:
        idle.pop()[1].close()
    if os.getpid() != owner:
        return  # a fork of the process that started it has no business in ending it
    if process.stderr:
        process.stderr.close()
    # The closed socket ends the server, and the launcher then waits until the last job is gone.
    handle = None
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(process.pid)
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        if not ended.poll(_STOP_MS) and remove:
            subprocess.run(remove, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if handle is not None:
        os.close(handle)
    process.kill()
    process.wait()
