"""What differs between the backends, as the fork server, a job's supervisor and its programs see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

SHELL = "/bin/bash"


class Enclosure(Protocol):
    """One job's place. The supervisor builds and closes it; a program enters it and never leaves."""

    work: str
    """The directory that programs begin in."""
    own_count: bool
    """Whether the kernel counts the job's processes by themselves."""

    def build(self, limits: dict[str, Any]) -> None:
        """For a job, the first one or another after `vacate`."""

    def vacate(self) -> bool:
        """Leaves nothing of the job, whose last program has ended. Whether that could be done without a look at what
        it was, so that `build` may follow."""

    def renew(self) -> None:
        """Empty directories for the next program, when the last one left something."""

    def started(self, pid: int) -> None:
        """The supervisor has started this program."""

    def enter(self) -> None:
        """In the program, while it still has its descriptors and its identity."""

    def lose_identity(self) -> None:
        """In the program."""

    def lock(self) -> None:
        """In the program, last: the system-call filter."""

    def processes(self) -> list[str]:
        """The ids of every process that the job's programs are made of."""

    def newest(self) -> int:
        """The id of the process or thread that was started last; 0 where the kernel does not say."""

    def signal(self, number: int) -> None:
        """Reaches all of them; none is not an error."""

    def overdrawn(self) -> bool:
        """Whether a limit is passed that the kernel does not keep here."""

    def close(self) -> None:
        """Ends what is left of the programs, and their files."""


class Walls(Protocol):
    """One backend."""

    slots: int
    """Jobs that can have a user id of their own; 0: they all have the one id there is."""
    import_paths: list[str]
    """Directories in which jobs find modules beside the standard library."""
    shell: bool
    """Whether jobs can run one."""
    canary: str | None
    """A file that programs may read and must not change, where they see files of the host at all."""

    def launch(self, serve: Callable[[], None], report: Callable[[BaseException], None]) -> int:
        """In the launcher: forks a process that is behind the walls and serves; its id. It ends with the launcher."""

    def fork(self) -> int:
        """In the server: forks a supervisor."""

    def enclosure(self, slot: int) -> Enclosure:
        """In the supervisor."""

    def forget(self, pid: int) -> None:
        """In the server: that supervisor has ended."""

    def demolish(self) -> None:
        """In the launcher, after the server has ended: waits for its last job, and removes what it left."""
