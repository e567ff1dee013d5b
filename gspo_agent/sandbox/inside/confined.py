"""The backend `landlock`, for containers that may make no namespaces; and `unsafe`, which confines nothing.

A program is one process with threads that has, where the fork server is root with Docker's capabilities, a user id of
its own. Landlock lets it read the interpreter and change its own two directories, the filter lets it make no other
process and reach none.

What is lost against `ns`:
- subprocesses: fork and exec are refused, and with them `multiprocessing`;
- /proc (but for /dev/stdin), /tmp and /dev/shm: TMPDIR is a directory of the job's own, and paths differ between jobs;
- hidden names: that a file exists, its size and its times can be seen; what is in it can't;
- the kernel's own quotas: files, bytes and, without an id of its own, threads are counted every 50 ms, and a file that
  was unlinked while open is not counted; who passes a limit is stopped, a call is not refused;
- without ids of their own: chmod, chown and utime, which could change the trainer's files, and Linux before 6.2, whose
  Landlock lets a file that may be read be cut off (the self-test finds that);
- before Linux 5.19: moving a file to another directory.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import descendants, landlock, linux, namespaces
from .seccomp import Filter
from .walls import SHELL

_NEEDED = {0: "CHOWN", 1: "DAC_OVERRIDE", 3: "FOWNER", 5: "KILL", 6: "SETGID", 7: "SETUID"}
_PREFIX = "gspo-sandbox-"
_STARTING_S = 10.0
_DEVICES = {"null": landlock.USE, "zero": landlock.USE, "full": landlock.USE, "random": 4, "urandom": 4}
_OTHER_INTERPRETER = 'name an interpreter that everyone can read, as in [sandbox] python = "/usr/bin/python3"'
_BLOCK = 512  # what st_blocks counts in


class Confined:
    """Jobs in directories of their own below a scratch directory, which goes with the launcher."""

    safe = True
    shell = False

    def __init__(self, packages: list[str], sites: list[str], scratch: str) -> None:
        self.packages, self.sites = packages, sites
        self.version = landlock.version() if self.safe else 0
        self.first, self.slots = self._identities()
        self.filter = Filter(alone=True, owner=not self.slots) if self.safe else None
        if self.slots:
            _check_reachable(os.__file__, self.first + 1, _OTHER_INTERPRETER)
            for site in sites:
                _check_reachable(site, self.first + 1, "let everyone read the image")
        _sweep(scratch)
        self.base = os.path.join(os.path.realpath(scratch), f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}")
        self.canary: str | None = f"{self.base}/canary"
        self._package_path = f"{self.base}/packages"
        self.import_paths = [*sites, self._package_path] if packages else sites
        self.readable: list[tuple[int, int]] = []

    def _identities(self) -> tuple[int, int]:
        if not self.safe or os.geteuid() != 0:
            return 0, 0
        missing = [name for number, name in _NEEDED.items() if not namespaces.has_capabilities(number)]
        if missing:
            names = ", ".join(f"CAP_{name}" for name in missing)
            raise linux.Unfit(f"root without {names}", f"run as an ordinary user, or add {names}")
        found = namespaces.unused_identities()
        if not found.many:
            raise linux.Unfit("too few user ids are mapped for jobs to have their own", "run as an ordinary user")
        return found.first, min(found.count - 1, 4096)

    def launch(self, serve: Callable[[], None], report: Callable[[BaseException], None]) -> int:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # what a killed server leaves is waited for here
        os.umask(0o022)
        os.mkdir(self.base, 0o711 if self.slots else 0o700)
        fcntl.flock(os.open(self.base, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)  # told apart from leftovers
        os.mkdir(self._package_path)
        for package in self.packages:
            _copy(package, f"{self._package_path}/{os.path.basename(package)}")
        if self.safe and self.canary:
            _create(self.canary)
            rules = [*_readable(), (self.canary, landlock.READ_FILE)]
            rules += [(path, landlock.READ) for path in (self._package_path, *self.sites)]
            self.readable = [(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in rules]
        pid = os.fork()
        if pid == 0:
            try:
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
                linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
                linux.prctl(linux.PR_SET_DUMPABLE, 0)
                serve()
            except BaseException as error:
                report(error)
            finally:
                os._exit(1)
        return pid

    def fork(self) -> int:
        return os.fork()

    def enclosure(self, slot: int) -> Folder:
        return Folder(self, self.first + slot if slot else 0)

    def forget(self, pid: int) -> None:
        """Only a killed supervisor has left its directories."""
        _remove(f"{self.base}/{pid}")

    def demolish(self) -> None:
        descendants.end_all()
        _remove(self.base)


class Unconfined(Confined):
    """`unsafe`: the same directories, and neither Landlock nor filter nor user id around what runs in them."""

    safe = False
    shell = os.path.exists(SHELL)


class Folder:
    """A job's two directories, and its one program."""

    def __init__(self, walls: Confined, uid: int) -> None:
        self._walls, self._uid = walls, uid
        self._path = f"{walls.base}/{os.getpid()}"
        self.work, self._temporary = f"{self._path}/work", f"{self._path}/tmp"
        self.own_count = uid > 0
        self._names_seen = False
        self._limits: dict[str, Any] = {}
        self._handles: dict[int, int] = {}

    def build(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        os.mkdir(self._path, 0o711)
        self._make_directories()

    def _make_directories(self) -> None:
        for path in (self.work, self._temporary):
            os.mkdir(path, 0o700)
            if self._uid:
                os.chown(path, self._uid, self._uid)

    def vacate(self) -> bool:
        if self._names_seen or not self._remove_directories():
            return False
        os.rmdir(self._path)
        return True

    def renew(self) -> None:
        if not self._remove_directories():
            self._names_seen = True
            _empty(self._path)
            os.chmod(self._path, 0o711)
        self._make_directories()

    def _remove_directories(self) -> bool:
        """Where they are empty."""
        try:
            os.rmdir(self.work)
            os.rmdir(self._temporary)
        except OSError:
            return False
        return True

    def started(self, pid: int) -> None:
        self._reach(0)
        self._handles[pid] = os.pidfd_open(pid)

    def enter(self) -> None:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._walls.safe:
            rules = landlock.Ruleset(self._walls.version)
            for fd, rights in self._walls.readable:
                rules.allow(fd, rights)
            for path in (self.work, self._temporary):
                rules.allow(os.open(path, os.O_PATH | os.O_CLOEXEC), landlock.CHANGE)
            rules.restrict_self()
        os.environ.update(HOME=self.work, TMPDIR=self._temporary)

    def lose_identity(self) -> None:
        if self._uid:
            namespaces.take_slot(self._uid)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of ids cleared it

    def lock(self) -> None:
        if self._walls.filter:
            self._walls.filter.install()

    def processes(self) -> list[str]:
        return [str(pid) for pid in (self._handles if self._walls.safe else descendants.of(os.getpid()))]

    def newest(self) -> int:
        return 0

    def signal(self, number: int) -> None:
        if self._walls.safe:
            return self._reach(number)
        reached: set[int] = set()
        while more := descendants.of(os.getpid()) - reached:  # until none was made in the meantime
            for pid in more:
                descendants.tell(pid, number)
            reached |= more

    def _reach(self, number: int) -> None:
        """By handle: an id that was waited for may be another process's by now."""
        for pid, handle in list(self._handles.items()):
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                os.close(handle)
                del self._handles[pid]

    def overdrawn(self) -> bool:
        if not self.own_count and descendants.count_threads(self.processes()) > self._limits["processes"]:
            return True
        used, files = 0, 0
        for status in _walk(self.work, self._temporary):
            used, files = used + status.st_blocks * _BLOCK, files + 1
            if used > self._limits["disk_bytes"] or files > self._limits["files"]:
                return True
        return False

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        descendants.wait_for_all()
        _remove(self._path)


def _readable() -> Iterator[tuple[str, int]]:
    """What a program may read, and how: the interpreter without installed packages, and harmless devices."""
    bound, masked = namespaces.interpreter()
    for path in bound:
        yield from _around(path, masked)
    for name, rights in _DEVICES.items():
        yield f"/dev/{name}", rights


def _around(path: str, masked: list[str]) -> Iterator[tuple[str, int]]:
    """A rule reaches all below it, so around what is masked there is one for each neighbour."""
    if not os.path.isdir(path):
        yield path, landlock.READ_FILE
    elif not any(hidden.startswith(path + "/") for hidden in masked):
        yield path, landlock.READ
    else:
        yield path, landlock.READ_DIR  # or nothing could be imported from it
        for entry in os.scandir(path):
            if entry.path not in masked and not entry.is_symlink():
                yield from _around(entry.path, masked)


def _check_reachable(path: str, uid: int, remedy: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.take_slot(uid)
            os.close(os.open(path, os.O_RDONLY))
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        path = os.path.realpath(path)
        above = [path[:end] for end, letter in enumerate(path) if letter == "/" and end]
        closed = [folder for folder in above if not os.stat(folder).st_mode & stat.S_IXOTH]
        raise linux.Unfit(
            f"jobs have user ids of their own, which can't read {path} ({closed[0] if closed else path} is private)",
            remedy,
        )


def _create(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def _copy(source: str, target: str) -> None:
    """To where every id may read it, with the times that compiled files go by."""
    if os.path.isdir(source):
        os.mkdir(target)
        for name in os.listdir(source):
            _copy(f"{source}/{name}", f"{target}/{name}")
        return
    with open(source, "rb") as old, open(target, "wb") as new:
        new.write(old.read())
    os.utime(target, (os.stat(source).st_atime, os.stat(source).st_mtime))


def _walk(*directories: str) -> Iterator[os.stat_result]:
    """Everything below, while programs may be changing it."""
    waiting = list(directories)
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield status
            if stat.S_ISDIR(status.st_mode):
                waiting.append(entry.path)


def _empty(path: str) -> None:
    """Whatever lies in it, however deep and however closed; nothing may be running in it any more."""
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        os.chmod(directory, 0o700)
        for entry in list(os.scandir(directory)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                near = f"{path}/{os.urandom(8).hex()}"  # so that no path is too long
                os.rename(entry.path, near)
                waiting.append(near)
            else:
                os.unlink(entry.path)
        if directory != path:
            os.rmdir(directory)


def _remove(path: str) -> None:
    try:
        _empty(path)
        os.rmdir(path)
    except OSError:
        return  # it was never made, or the last one writing to it is just ending: the launcher's end removes it


def _sweep(scratch: str) -> None:
    """Removes what launchers left that were killed: nobody holds its lock."""
    for entry in os.scandir(scratch):
        try:
            status = entry.stat(follow_symlinks=False)
            if not entry.name.startswith(_PREFIX) or status.st_uid != os.geteuid() or not entry.is_dir():
                continue
            if time.time() - status.st_mtime < _STARTING_S:
                continue
            fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(entry.path)
            finally:
                os.close(fd)
        except OSError:
            continue
