"""The fork server: a warm interpreter behind walls that turns each request into a job.

The launcher stays outside, ends with the trainer and takes the rest with it; the end of the server is the end of every
job. A request is one packet with one descriptor, the
job's channel; everything else about a job is said on that channel, to its supervisor.
"""

from __future__ import annotations

import _signal
import errno
import gc
import json
import os
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from . import linux, program, rehearsal, supervisor, warm
from .confined import Confined, Unconfined
from .namespaces import Namespaces
from .walls import Walls

_BACKENDS: dict[str, Callable[[list[str], list[str], str], Walls]] = {
    "ns": lambda packages, sites, scratch: Namespaces(packages, sites),
    "landlock": Confined,
    "unsafe": Unconfined,
}

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
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
    wanted = json.loads(control.recv(1 << 16))
    packages = wanted["packages"]
    if packages:
        from . import exchange as exchange  # while its file is in sight
    trainer = None
    if wanted["trainer"]:  # from inside a container it can't be seen; its end closes the control socket
        trainer = os.pidfd_open(wanted["trainer"])
        if os.getppid() != wanted["trainer"]:
            os._exit(0)  # it died before we could watch it
    try:
        sites = own_sites() if wanted["sites"] is None else wanted["sites"]
        _check_version(sites)
        walls = _BACKENDS[wanted["backend"]](packages, sites, wanted["scratch"])
        server = walls.launch(lambda: _serve(control, walls), lambda error: _report(control, error))
    except OSError as error:
        _report(control, error)
        os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    control.close()
    _watch(trainer, server, walls)


def _check_version(sites: list[str]) -> None:
    """Packages may hold extension modules, which another version would not load."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for site in sites:
        found = re.search(r"/python(3\.\d+)/[^/]+$", site)
        if found and found[1] != own:
            remedy = f'name an interpreter of that version, as in [sandbox] python = "/usr/bin/python{found[1]}"'
            raise linux.Unfit(f"{site} has packages for Python {found[1]}, and jobs have {own}", remedy)


def own_sites() -> list[str]:
    """Where the packages of this interpreter are, which runs without them."""
    import subprocess  # with it comes `threading`, which does something after every fork

    code = "import sys; print(*[path for path in sys.path if path.endswith('-packages')], sep='\\n', end='')"
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True, text=True)
    return found.stdout.splitlines()


def _serve(control: socket.socket, walls: Walls) -> None:
    for fd in (0, 1, 2):
        os.dup2(os.open("/dev/null", os.O_RDWR), fd)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    _Server(control, walls).serve()


def _volunteer() -> None:
    """The kernel, when it runs out of memory, ends this process and what it starts before the trainer."""
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # or the file is not its own
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"1000")
    os.close(fd)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


def _report(control: socket.socket, error: BaseException) -> None:
    if isinstance(error, linux.Unfit):
        said = {"error": str(error), "remedy": error.remedy}
    else:
        steps = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        said = {"error": f"{error} (in {' > '.join(steps[-3:])})"}
    control.send(json.dumps(said).encode())


def _watch(trainer: int | None, server: int, walls: Walls) -> None:
    """Waits for the first of the two to end and ends the other, what the server left, and itself."""
    handle = os.pidfd_open(server)
    waiting = select.poll()
    if trainer is not None:
        waiting.register(trainer, select.POLLIN)
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.waitpid(server, 0)
    walls.demolish()
    os._exit(0)


class _Server:
    """Consumes requests; waits for the control socket and for ended jobs; its own end is a closed control socket."""

    def __init__(self, control: socket.socket, walls: Walls) -> None:
        self.control, self.walls = control, walls
        self.free = list(range(walls.slots, 0, -1))
        self.running: dict[int, int] = {}
        self.wake, wake = socket.socketpair()
        for end in (self.wake, wake):
            end.setblocking(False)
        self.signalled = wake
        self.own_fds = (control.fileno(), self.wake.fileno(), wake.fileno())
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 is deaf to what it has no handler for
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        sys.set_int_max_str_digits(0)

    def serve(self) -> None:
        warm.import_all()
        if self.walls.import_paths:
            warm.import_packages(self.walls.import_paths)
        program.prepare()
        rehearsal.rehearse(own_ids=self.walls.slots > 0)
        linux.share_text()
        gc.collect()
        self.fillers = rehearsal.fill_gaps()
        gc.freeze()
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wake, select.POLLIN)
        walls = self.walls
        hello = {"ready": True, "own_uids": walls.slots > 0, "canary": walls.canary, "shell": walls.shell}
        self.control.send(json.dumps(hello).encode())
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
            pass  # too many processes, or jobs: the closed channel says that the job is lost
        finally:
            channel.close()
        return True

    def start(self, channel: socket.socket) -> None:
        if self.walls.slots and not self.free:
            raise OSError(errno.EAGAIN, "every job's user id is taken")
        slot = self.free.pop() if self.walls.slots else 0
        pid = -1
        try:
            pid = self.walls.fork()
            if pid == 0:
                self._become_supervisor(channel, slot)
        finally:
            if pid < 0 and slot:
                self.free.append(slot)
        self.running[pid] = slot

    def _become_supervisor(self, channel: socket.socket, slot: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # not `signal.signal`, which looks up enumerations
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()  # signals to a process group do not stop at the border of a pid namespace
            for fd in self.own_fds:
                os.close(fd)
            _volunteer()
            supervisor.supervise(channel, self.walls.enclosure(slot))
        finally:
            os._exit(0)

    def reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = self.running.pop(pid, 0)
            self.walls.forget(pid)
            if slot:
                self.free.insert(0, slot)  # the longest possible time before an id is used again
