"""Starts the fork server, proves that it isolates, and hands out channels to new jobs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import probe
from gspo_agent.sandbox.inside import frames

_PACKAGE = Path(__file__).parent
# The directory goes through the socket: an argument or a variable could be read by the jobs.
_BOOT = (
    "import os, sys; sys.path.insert(0, os.read(0, 4096).decode()); "
    "from inside import forkserver; del sys.path[0]; forkserver.main()"
)
_FLAGS = ("-s", "-S", "-P", "-X", "utf8", "-X", "int_max_str_digits=0")
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
_START_S = 30.0
_SEND_S = 10.0


class ForkServer:
    """A running fork server; it and everything in it ends with this process, with `close`, or with this object."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """Waits until the server is up and no probe got out; SandboxError with the failed step and the remedy.

        Args:
            packages: directories of packages that its jobs may import, beside the standard library.
        """
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"the sandbox needs Linux (namespaces and seccomp); this is {sys.platform}")
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), *_FLAGS, "-c", _BOOT],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self._owner, self._packages = os.getpid(), list(packages)
        self._finalizer = weakref.finalize(self, _stop, self._control, self._process, self._owner)
        try:
            self.own_uids = bool(self._hello()["own_uids"])
            self._probe()
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
        """A channel to the supervisor of a new job; closing it ends the job. OSError when the server is gone."""
        near, far = socket.socketpair()
        with far:
            try:
                socket.send_fds(self._control, [b"job"], [far.fileno()])
            except OSError:
                near.close()
                raise
        return near

    def close(self) -> None:
        """Ends the server and every job."""
        self._finalizer()

    def _hello(self) -> dict[str, Any]:
        self._control.settimeout(_START_S)
        hello: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            self._control.send(str(_PACKAGE).encode())
            wanted = {"trainer": os.getpid(), "backend": "ns", "packages": self._packages}
            self._control.send(json.dumps(wanted).encode())
            hello = json.loads(self._control.recv(1 << 16) or b"{}")
        if "ready" not in hello:
            what = hello.get("error") or f"the fork server did not start: {self._last_words()}"
            raise SandboxError(f"no isolation on this machine: {what}. {probe.remedy()}")
        assert self._process.stderr is not None
        self._process.stderr.close()
        return hello

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        self._process.kill()
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"no answer within {_START_S:g} s"

    def _probe(self) -> None:
        code, stdin, limits = probe.program()
        with self.spawn() as channel:
            channel.settimeout(_START_S)
            channel.sendall(frames.pack({"kind": "run", "limits": limits.as_dict()}, code, stdin))
            try:
                header, blobs = frames.receive(channel)
            except (OSError, EOFError) as error:
                raise SandboxError(f"the first job was lost ({error or 'closed channel'}). {probe.remedy()}") from None
        probe.judge(header, *blobs)


def _stop(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    control.close()
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
        ended.poll(2000)
    if handle is not None:
        os.close(handle)
    process.kill()
    process.wait()
