"""The two walls around the fork server.

The outer one (user namespace where not root; mount, pid, network, ipc, uts, cgroup) gets a root directory of its own
that holds the interpreter and nothing else of the host. The inner one is a second user and mount namespace on top: in
it the outer mounts are locked, and root is an unused id of the host.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import linux
from .seccomp import Filter
from .walls import SHELL

_SITES, _PACKAGES = "/site", "/packages"
_NEW_ROOT = "/proc"  # the one directory that exists everywhere and that nothing bound below comes from
_OUTER = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)  # fmt: skip
_DIRECTORIES = ("/box/work", "/box/tmp")
_USER = 1000
_HOST = "sandbox"  # the same everywhere: what a program prints of it is printed again on another machine
_SETGID, _SETUID, _SYS_ADMIN = 6, 7, 21
DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/share/git-core", "/etc/alternatives")
_SYSTEM_ROOTS = ("bin", "lib", "lib64")
_COMMANDS = "/usr/local/bin"
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
_MAX_SLOTS = 16384
_PREFERRED_BASE = 0x70000000  # far above what login.defs, subuid and container runtimes hand out


@dataclass(frozen=True, slots=True)
class Identities:
    """Ids of the inner user namespace: 0 is the fork server, and where there are many, each job has one of its own."""

    first: int
    count: int

    @property
    def many(self) -> bool:
        return self.count > 1

    @property
    def map_line(self) -> str:
        return f"0 {self.first} {self.count}\n"


class Namespaces:
    """The backend `ns`."""

    canary: str | None = None

    def __init__(self, packages: list[str], sites: list[str]) -> None:
        """`sites`: directories of an image's packages; with one, jobs have the programs of this machine's system."""
        self.identities = choose_identities()
        self.slots = min(self.identities.count - 1, 4096)
        self._bound = {path: f"{_PACKAGES}/{os.path.basename(path)}" for path in packages}
        self._bound |= {path: f"{_SITES}/{number}" for number, path in enumerate(sites)}
        self.import_paths = [self._bound[path] for path in sites] + [_PACKAGES] * bool(packages)
        self._system = bool(sites)
        self.shell = self._system and os.path.exists(SHELL)
        self._filter = Filter()
        self._own_pids = self._last_pid = -1

    def launch(self, serve: Callable[[], None], report: Callable[[BaseException], None]) -> int:
        if not has_admin():
            become_root_of_user_namespace()
        near, far = socket.socketpair()
        linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            try:
                near.close()
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
                self._build(far)
                serve()
            except BaseException as error:
                report(error)
            finally:
                os._exit(1)
        far.close()
        with near:
            if near.recv(1) == b"?":
                map_identities(pid, self.identities)
                near.send(b"!")
        return pid

    def _build(self, launcher: socket.socket) -> None:
        enter_outer(self._bound, system=self._system)
        enter_inner()
        launcher.send(b"?")
        if launcher.recv(1) != b"!":
            raise OSError("the launcher could not map the ids")
        take_identity(self.identities)
        launcher.close()
        _enter_own_pids()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        with contextlib.suppress(OSError):  # it is an option of the kernel
            self._last_pid = os.open("/proc/sys/kernel/ns_last_pid", os.O_RDWR)

    def fork(self) -> int:
        pid = -1
        linux.unshare(linux.CLONE_NEWPID)
        try:
            pid = os.fork()
        finally:
            if pid:
                linux.setns(self._own_pids, linux.CLONE_NEWPID)
            else:
                os.close(self._own_pids)
        return pid

    def enclosure(self, slot: int) -> Box:
        return Box(slot, self._filter, self._last_pid)

    def forget(self, pid: int) -> None:
        """Its namespaces went with it."""

    def demolish(self) -> None:
        """The end of the server was the end of its namespace."""


class Box:
    """A job's own mount and ipc namespace with a disk in memory; the supervisor is pid 1 of its pid namespace, deaf to
    signals from inside, and when it ends, the kernel ends the rest."""

    work = _DIRECTORIES[0]
    own_count = True

    def __init__(self, slot: int, seccomp: Filter, last_pid: int) -> None:
        """`last_pid`: the kernel's file of the last id that was given in the reader's namespace, or -1."""
        self._slot, self._filter, self._last_pid = slot, seccomp, last_pid
        self._options, self._files = "", 0

    def build(self, limits: dict[str, Any]) -> None:
        if not self._files:
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
            flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
            linux.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")
            os.umask(0)
        self._files = limits["files"]
        self._options = f"size={limits['disk_bytes']},nr_inodes={self._files + 1 + len(_DIRECTORIES)},mode=0755"
        self._mount_disk()

    def _mount_disk(self) -> None:
        linux.mount("tmpfs", "/box", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, self._options)
        for path in _DIRECTORIES:
            os.mkdir(path, 0o1777)

    def vacate(self) -> bool:
        if self._last_pid < 0:  # the id of the next program would say how many there were
            return False
        try:
            os.pwrite(self._last_pid, b"1", 0)
            linux.unshare(linux.CLONE_NEWIPC)
            linux.umount("/box")
        except OSError:
            return False
        return True

    def renew(self) -> None:
        # Without an id of its own, a program owns what these directories are in as well.
        if not self._slot or os.statvfs("/box").f_ffree < self._files:
            linux.umount("/box")
            self._mount_disk()

    def started(self, pid: int) -> None:
        """It is among `processes`."""

    def enter(self) -> None:
        """The supervisor is inside already."""

    def lose_identity(self) -> None:
        if self._slot:
            take_slot(self._slot)
            return
        # Only one id is ours: a user namespace for each program keeps their process counts apart.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # or the maps are not its own to write
        linux.unshare(linux.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_USER} 0 1\n")
        _write("/proc/self/gid_map", f"{_USER} 0 1\n")

    def lock(self) -> None:
        self._filter.install()

    def processes(self) -> list[str]:
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def newest(self) -> int:
        return int(os.pread(self._last_pid, 16, 0)) if self._last_pid >= 0 else 0

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)

    def overdrawn(self) -> bool:
        return False

    def close(self) -> None:
        """The end of the supervisor is the end of it all."""


def take_slot(slot: int) -> None:
    os.setgroups([])
    os.setresgid(slot, slot, slot)
    os.setresuid(slot, slot, slot)


def choose_identities() -> Identities:
    """A range for jobs; the single own id without privilege."""
    return unused_identities() if has_admin() else Identities(0, 1)


def unused_identities() -> Identities:
    """A range that is mapped here and that no one uses; fewer than two where too few are mapped."""
    with open("/proc/self/uid_map") as table:
        inside, _, length = max((tuple(map(int, line.split())) for line in table), key=lambda row: row[2])
    if length >= _PREFERRED_BASE * 2:
        return Identities(_PREFERRED_BASE, _MAX_SLOTS)
    count = min(_MAX_SLOTS, length // 4)
    return Identities(inside + length - count - 16, count) if count > 1 else Identities(inside, 1)


def has_admin() -> bool:
    """Whether this process may make namespaces without a user namespace (CAP_SYS_ADMIN, SETUID and SETGID)."""
    return has_capabilities(_SYS_ADMIN, _SETUID, _SETGID)


def has_capabilities(*numbers: int) -> bool:
    """Whether this process is root and has them all."""
    with open("/proc/self/status") as status:
        effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return os.geteuid() == 0 and all(effective >> number & 1 for number in numbers)


def become_root_of_user_namespace() -> None:
    """Without privilege: a user namespace in which this process is root and has the one id it has."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1\n")
    _write("/proc/self/gid_map", f"0 {gid} 1\n")


def map_identities(pid: int, identities: Identities) -> None:
    """Run by the launcher, which has the privilege in the outer namespace, for the fork server in the inner one."""
    if not identities.many:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", identities.map_line)
    _write(f"/proc/{pid}/gid_map", identities.map_line)


def enter_outer(added: dict[str, str], *, system: bool = False) -> None:
    """Everything but the user namespace, and the new root directory; to be called by pid 1 of the new pid namespace.

    Args:
        added: directories and files of the host, and where they are seen.
        system: whether the host's own programs are.
    """
    linux.unshare(_OUTER)
    socket.sethostname(_HOST)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    _build_root(added, system)
    os.chdir(_NEW_ROOT)
    linux.pivot_root(".", ".")  # the old root lies on top of the new one until it is let go
    linux.umount(".")
    os.chdir("/")
    linux.make_read_only("/", recursive=False)  # a read-only /proc would keep jobs from mounting their own


def enter_inner() -> None:
    """The second user namespace; the launcher must write its maps before `take_identity`."""
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # or the maps belong to the outer root
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)


def take_identity(identities: Identities) -> None:
    if identities.many:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


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


def _build_root(added: dict[str, str], system: bool) -> None:
    # Everything is collected before /proc is covered.
    bound, masked = interpreter(system=system)
    linux.mount("tmpfs", _NEW_ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=1m")
    os.umask(0o022)
    for path in bound:
        _bind(path)
    for path in masked:
        linux.mount("tmpfs", _NEW_ROOT + path, "tmpfs", linux.MS_RDONLY, "mode=0755,size=4k")
    for path, place in added.items():
        _bind(path, place)
    if system:
        _add_commands()
    for name in DEVICES:
        _bind(f"/dev/{name}")
    for name, target in {"stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "fd": "fd"}.items():
        os.symlink(f"/proc/self/{target}", f"{_NEW_ROOT}/dev/{name}")
    os.symlink("/box/tmp", f"{_NEW_ROOT}/dev/shm")
    os.symlink("/box/tmp", f"{_NEW_ROOT}/tmp")
    for name in ("box", "proc", "etc"):
        os.makedirs(f"{_NEW_ROOT}/{name}", exist_ok=True)
    _write(f"{_NEW_ROOT}/etc/passwd", "user:x:1000:1000::/box/work:/bin/false\n")
    for loader in _LOADERS:
        if os.path.exists(loader) and not os.path.lexists(_NEW_ROOT + loader):
            os.makedirs(os.path.dirname(_NEW_ROOT + loader), exist_ok=True)
            os.symlink(os.path.realpath(loader), _NEW_ROOT + loader)
    linux.mount("proc", f"{_NEW_ROOT}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)


def _add_commands() -> None:
    """What a shell expects where: `python`, and the directories that today are links into /usr."""
    os.makedirs(_NEW_ROOT + _COMMANDS, exist_ok=True)
    for name in ("python", "python3"):
        if not os.path.lexists(f"{_NEW_ROOT}{_COMMANDS}/{name}"):
            os.symlink(os.path.realpath(sys.executable), f"{_NEW_ROOT}{_COMMANDS}/{name}")
    for name in _SYSTEM_ROOTS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{_NEW_ROOT}/{name}")
        elif os.path.isdir(f"/{name}"):
            _bind(f"/{name}")


def interpreter(*, system: bool = False) -> tuple[list[str], list[str]]:
    """Paths of the interpreter, its standard library and the shared libraries; and what is hidden inside them."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    found = {library, os.path.realpath(sys.executable), "/usr/share/zoneinfo", *(_SYSTEM if system else ())}
    if sys.base_prefix != "/usr":
        found.add(os.path.realpath(os.path.join(sys.base_prefix, "lib")))
    found.update(os.path.realpath(path) for path in sys.path if os.path.basename(path) == "lib-dynload")
    with open("/proc/self/maps") as maps:
        objects = {line.split()[-1] for line in maps if ".so" in line and line.split()[-1].startswith("/")}
    found.update(os.path.dirname(path) for path in objects)
    outermost = [path for path in sorted(found) if os.path.exists(path)]
    outermost = [path for path in outermost if not any(path.startswith(other + "/") for other in outermost)]
    masked = [
        path
        for parent in {library, *outermost}
        for pattern in ("site-packages", "dist-packages", "python3*/site-packages", "python3*/dist-packages")
        for path in glob.glob(f"{parent}/{pattern}")
        if any(path.startswith(other + "/") for other in outermost)
    ]
    return outermost, sorted(set(masked))


def _bind(path: str, place: str | None = None) -> None:
    target = _NEW_ROOT + (place or path)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
    if path.startswith("/dev/"):
        return  # nodev would close the device
    linux.make_read_only(target)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)  # the file objects of `open` touch many more pages
    os.write(fd, text.encode())
    os.close(fd)
