"""Whether the isolation holds here: escapes are tried, versions are not read."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox.limits import SandboxLimits

_ESCAPES = Path(__file__).parent / "inside" / "escapes.py"
_OWN_NAMES = {"bin", "box", "dev", "etc", "lib", "lib64", "packages", "proc", "site", "tmp", "usr"}
_SWITCHES = {  # file: (value that forbids, remedy)
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "set sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "set sysctl kernel.apparmor_restrict_unprivileged_userns=0, or give the interpreter an AppArmor profile with "
        "'userns,'",
    ),
    "/proc/sys/user/max_user_namespaces": ("0", "set sysctl user.max_user_namespaces=10000"),
}


class NotIsolated(SandboxError):
    """A backend that does not hold here: which one, what failed, and what would help."""

    def __init__(self, backend: str, what: str, help: str | None = None) -> None:
        self.backend, self.what, self.remedy = backend, what, help or remedy()
        said = f"no isolation on this machine by {backend}: {what}. Nothing will be run here."
        super().__init__(f"{said} Remedy: {self.remedy}.")


def program(canary: str | None = None) -> tuple[bytes, bytes, SandboxLimits]:
    """A job that tries to get out: its code, its standard input and its limits."""
    secrets = [__file__, "/etc/shadow", "/etc/hostname"]
    for directory in (os.getcwd(), os.path.expanduser("~"), sysconfig.get_path("purelib")):
        secrets += _entries(directory)
    stdin = json.dumps({"secrets": secrets, "canary": canary}).encode()
    return _ESCAPES.read_bytes(), stdin, SandboxLimits(cpu_s=10, wall_s=30)


def _entries(directory: str) -> list[str]:
    """Some of what lies there, without the way to the interpreter and what the sandbox has of its own."""
    try:
        paths = [os.path.join(directory, name) for name in sorted(os.listdir(directory))[:50]]
    except OSError:
        return []
    needed = os.path.realpath(os.__file__)
    return [path for path in paths if not needed.startswith(path) and path.strip("/") not in _OWN_NAMES]


def judge(backend: str, header: dict[str, Any], stdout: bytes = b"", stderr: bytes = b"") -> None:
    """NotIsolated when anything got out, or when the probes could not run."""
    if header["status"] != "ok":
        said = stderr.decode(errors="replace").strip().splitlines() or [str(header.get("reason", header["status"]))]
        raise NotIsolated(backend, f"the probes could not run: {said[-1]}")
    breaches = json.loads(stdout)
    if breaches:
        raise NotIsolated(backend, "; ".join(breaches))


def remedy() -> str:
    """What to change on this machine, as far as it can be told from its switches."""
    for path, (forbids, advice) in _SWITCHES.items():
        try:
            value = Path(path).read_text().strip()
        except OSError:
            continue
        if value == forbids:
            return advice
    return (
        "run as root or allow user namespaces (Linux 5.12 or newer); in Docker start the container with "
        "--security-opt seccomp=PROFILE that allows unshare, mount, setns and pivot_root, and with "
        "--security-opt systempaths=unconfined; in Kubernetes use an unconfined seccomp profile and procMount: Unmasked"
    )
