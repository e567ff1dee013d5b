"""What isolates code on this machine, why, and how to get more."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from gspo_agent.sandbox.forkserver import PREFERRED, ForkServer
from gspo_agent.sandbox.inside import confined
from gspo_agent.sandbox.probe import NotIsolated
from gspo_agent.sandbox.settings import Backend, SandboxSettings

_WHAT = {
    "ns": "namespaces: a root directory, a network and processes of its own for every job",
    "landlock": "one process a job, Landlock and a system-call filter around it",
    "container": "landlock inside a container",
    "unsafe": "nothing",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of starting one backend and running its escape cases."""

    backend: Backend
    own_uids: bool = False
    refused: NotIsolated | None = None

    def __str__(self) -> str:
        lines = [f"{self.backend}: {_WHAT[self.backend]}"]
        if self.refused:
            lines += [f"  not here: {self.refused.what}", f"  remedy: {self.refused.remedy}"]
        elif self.backend == "unsafe":
            lines.append("  nothing is tested: code can do whatever this user can")
        else:
            ids = "jobs have user ids of their own" if self.own_uids else "jobs share this user's id"
            lines.append(f"  self-test: every attempt to get out failed; {ids}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: list[Finding]

    @property
    def chosen(self) -> Backend | None:
        """The first that holds, which is what a run gets."""
        return next((finding.backend for finding in self.findings if not finding.refused), None)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        if self.chosen is None:
            return "\n".join([*lines, "no code is run on this machine: nothing isolates it"])
        lines.append(f"code runs in: {self.chosen}")
        if self.chosen in ("landlock", "container"):
            lost = (confined.__doc__ or "").partition("What is lost against `ns`:\n")[2]
            lines += ["what that lacks, and ns has:", textwrap.indent(lost.rstrip(), "  ")]
        return "\n".join(lines)


def examine(settings: SandboxSettings) -> Diagnosis:
    """Starts every backend that `settings` allow; takes a second."""
    backends = PREFERRED if settings.backend == "auto" else (settings.backend,)
    return Diagnosis([_try(replace(settings, backend=backend)) for backend in backends])


def _try(settings: SandboxSettings) -> Finding:
    try:
        server = ForkServer(settings)
    except NotIsolated as error:
        return Finding(settings.backend, refused=error)
    server.close()
    return Finding(settings.backend, server.own_uids)
