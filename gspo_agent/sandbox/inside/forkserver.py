"""The fork server: a warm interpreter behind two walls that turns each request into a job.

The launcher stays outside, ends with the trainer and takes the rest with it; the server is pid 1 of its own pid
namespace, so that its end is the end of every job. A request is one packet with one descriptor, the
job's channel; everything else about a job is said on that channel, to its supervisor.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback

from . import linux, namespaces, supervisor, warm
from .seccomp import Filter

_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/box/work",
    "TMPDIR": "/tmp",
    "USER": "user",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    """The launcher. Descriptor 0 is the control socket; its first packet is the configuration."""
    control = socket.socket(fileno=os.dup(0))
    trainer_pid = int(json.loads(control.recv(1 << 16))["trainer"])
    trainer = os.pidfd_open(trainer_pid)
    if os.getppid() != trainer_pid:
        os._exit(0)  # it died before we could watch it
    try:
        server, near = _start_server(control)
    except OSError as error:
        _report(control, error)
        os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    control.close()
    _watch(trainer, server, near)


def _start_server(control: socket.socket) -> tuple[int, socket.socket]:
    identities = namespaces.choose_identities()
    if not namespaces.has_admin():
        namespaces.become_root_of_user_namespace()
    near, far = socket.socketpair()
    linux.unshare(linux.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            near.close()
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            _build(far, identities)
            _Server(control, identities).serve()
        except BaseException as error:
            _report(control, error)
        finally:
            os._exit(1)
    far.close()
    if near.recv(1) == b"?":
        namespaces.map_identities(pid, identities)
        near.send(b"!")
    return pid, near


def _build(launcher: socket.socket, identities: namespaces.Identities) -> None:
    namespaces.enter_outer()
    namespaces.enter_inner()
    launcher.send(b"?")
    if launcher.recv(1) != b"!":
        raise OSError("the launcher could not map the ids")
    namespaces.take_identity(identities)
    launcher.close()
    _enter_own_pids()
    for fd in (0, 1, 2):
        os.dup2(os.open("/dev/null", os.O_RDWR), fd)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)


def _enter_own_pids() -> None:
    """Forks into a pid namespace that belongs to the inner user namespace, so that the server may return to it after
    making one for a job; the outer process only waits."""
    linux.unshare(linux.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        os.closerange(0, 1 << 30)
        os.waitpid(pid, 0)
        os._exit(0)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


def _report(control: socket.socket, error: BaseException) -> None:
    steps = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    control.send(json.dumps({"error": f"{error} (in {' > '.join(steps[-3:])})"}).encode())


def _watch(trainer: int, server: int, near: socket.socket) -> None:
    """Waits for the first of the two to end and ends the other, and itself."""
    handle = os.pidfd_open(server)
    waiting = select.poll()
    waiting.register(trainer, select.POLLIN)
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.waitpid(server, 0)
    near.close()
    os._exit(0)


class _Server:
    """Consumes requests; waits for the control socket and for ended jobs; its own end is a closed control socket."""

    def __init__(self, control: socket.socket, identities: namespaces.Identities) -> None:
        self.control, self.identities, self.filter = control, identities, Filter()
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self.free = list(range(min(identities.count - 1, 4096), 0, -1)) if identities.many else []
        self.running: dict[int, int] = {}
        self.wake, wake = socket.socketpair()
        for end in (self.wake, wake):
            end.setblocking(False)
        self.signalled = wake
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 is deaf to what it has no handler for
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        sys.set_int_max_str_digits(0)

    def serve(self) -> None:
        warm.import_all()
        gc.collect()
        gc.freeze()
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wake, select.POLLIN)
        self.control.send(json.dumps({"ready": True, "own_uids": self.identities.many}).encode())
        while True:
            for fd, _ in waiting.poll():
                if fd == self.wake.fileno():
                    self.wake.recv(4096)
                    self.reap()
                elif not self.accept():
                    os._exit(0)

    def accept(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self.control, 64, 1)
        if not packet:
            return False
        channel = socket.socket(fileno=fds[0])
        try:
            self.start(channel)
        except OSError:
            pass  # too many processes: the closed channel says that the job is lost
        finally:
            channel.close()
        return True

    def start(self, channel: socket.socket) -> None:
        slot = self.free.pop() if self.identities.many else 0
        pid = -1
        try:
            linux.unshare(linux.CLONE_NEWPID)
            pid = os.fork()
            if pid == 0:
                self._become_supervisor(channel, slot)
        finally:
            if pid < 0 and slot:
                self.free.append(slot)
            linux.setns(self.own_pids, linux.CLONE_NEWPID)
        self.running[pid] = slot

    def _become_supervisor(self, channel: socket.socket, slot: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()  # signals to a process group do not stop at the border of a pid namespace
            for resource in (self.control, self.wake, self.signalled):
                resource.close()
            os.close(self.own_pids)
            supervisor.supervise(channel, slot, self.filter)
        finally:
            os._exit(0)

    def reap(self) -> None:
        while self.running:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            slot = self.running.pop(pid, 0)
            if slot:
                self.free.insert(0, slot)  # the longest possible time before an id is used again
