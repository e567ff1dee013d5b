"""A test file and the solution that it tests, in two jobs; what one says is passed on to the other.

The tests are trusted and the solution is not. Nothing of the conversation is understood here but its end, which only
the tests' side can say.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gspo_agent.errors import ConfigError
from gspo_agent.sandbox.channel import Channel, JobLost
from gspo_agent.sandbox.inside.tree import Tree, pack
from gspo_agent.sandbox.limits import SandboxLimits
from gspo_agent.sandbox.pressure import KILLED

_FILE = "test_file.py"
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_TESTER = SandboxLimits(result_bytes=64 << 20)
_MAX_STARVATION = 4  # times the wall limit of one answer that all answers to a test may take, waiting included
_TESTER_CPU_S, _TESTER_WALL_S = 3.0, 10.0  # beside the limits of a test, for pytest itself


@dataclass(frozen=True, slots=True)
class TestFileResult:
    """What came of a test file."""

    __test__ = False  # not for pytest to collect

    status: str
    """"ok": the file ran to its end. "task_error": it ended its own process. "infra_error", or the limit that its
    side passed."""
    report: dict[str, Any]
    """As `inside.peers.tests` makes it; empty unless the status is "ok"."""
    cpu_s: float = 0.0
    """Of the solution."""
    wall_s: float = 0.0

    @property
    def limit(self) -> str:
        """The limit that ended either side, or "ok"."""
        return self.report.get("lost") or self.status


def pytest_packages() -> list[str]:
    """The packages of pytest and of what it imports, as they are installed here; ConfigError where it is not."""
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            origin = Path(spec.origin).resolve()
            found.append(str(origin.parent if spec.submodule_search_locations else origin))
        elif name == "pytest":
            raise ConfigError("test files are run by pytest, which is not installed here: pip install pytest")
    return found


class _Side:
    """One job; counts what its answers to one test have cost."""

    def __init__(self, channel: Channel, name: str, limits: SandboxLimits) -> None:
        self.channel, self.name, self.limits = channel, name, limits
        self.cpu_s = self.wall_s = 0.0

    async def open(self, question: bytes) -> tuple[str, list[bytes]]:
        await self.channel.send({"kind": "exchange", "side": self.name, "limits": self.limits.as_dict()})
        return await self.ask(question)

    async def ask(self, question: bytes) -> tuple[str, list[bytes]]:
        """A status, and the answer with what was printed to standard output and standard error."""
        await self.channel.send({}, question)
        header, blobs = await self.channel.receive(5 * self.limits.wall_s + 60)
        if header["status"] == "infra_error":
            raise JobLost
        self.cpu_s += header["cpu_s"]
        self.wall_s += header["wall_s"]
        past = self.cpu_s > self.limits.cpu_s or self.wall_s > _MAX_STARVATION * self.limits.wall_s
        return "time_limit" if past else header["status"], blobs


@dataclass(frozen=True, slots=True)
class TestFile:
    """What is tested, and by what."""

    __test__ = False  # not for pytest to collect

    solution: Tree
    modules: Sequence[str]
    """Names, without a dot, that are the solution's when the tests import them."""
    tests: Tree
    """The solution never sees them."""
    path: str
    """Of the file that is run, in `tests`."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Modules inside of those of the solution that are the tests' all the same, such as "shapes.tests", and the
    directory in `tests` in which each is found."""

    @classmethod
    def of(cls, code: str, tests: str, module: str) -> Self:
        """One file that tests one file."""
        solution, source = (text.encode("utf-8", "surrogatepass") for text in (code, tests))
        return cls({f"{module}.py": ("file", solution)}, [module], {_FILE: ("file", source)}, _FILE)


async def converse(tester: Channel, solution: Channel, file: TestFile, limits: SandboxLimits) -> TestFileResult:
    """Waits for either side in turn until the tests have reported. JobLost when a job is gone."""
    started = time.monotonic()
    cpu_s, wall_s = limits.cpu_s + _TESTER_CPU_S, limits.wall_s + _TESTER_WALL_S
    room = {name: getattr(limits, name) for name in ("disk_bytes", "files")}
    ours = _Side(tester, "tests", dataclasses.replace(_TESTER, cpu_s=cpu_s, wall_s=wall_s, **room))
    theirs = _Side(solution, "solution", limits)
    ended, _ = await theirs.open(pack(file.solution))
    wanted = {"modules": list(file.modules), "own": dict(file.own), "file": file.path}
    status, blobs = await ours.open(json.dumps(wanted).encode() + b"\n" + pack(file.tests))
    item, cpu_s = 0, 0.0
    while status == "ok":
        head, _, message = blobs[0].partition(b"\n")
        said = json.loads(head)
        if "report" in said:
            return TestFileResult("ok", said["report"], cpu_s + theirs.cpu_s, time.monotonic() - started)
        if said["item"] != item:
            item, cpu_s = said["item"], cpu_s + theirs.cpu_s
            ours.cpu_s = ours.wall_s = theirs.cpu_s = theirs.wall_s = 0.0
        answer, out, err = b"", b"", b""
        if ended == "ok":
            ended, (answer, out, err) = await theirs.ask(message)
        heading = {"status": ended, "out": len(out), "err": len(err)}
        status, blobs = await ours.ask(json.dumps(heading).encode() + b"\n" + out + err + answer)
    if status == KILLED:
        raise JobLost  # not by the solution, which cannot reach it
    status = "task_error" if status == "runtime_error" else status
    return TestFileResult(status, {}, cpu_s + theirs.cpu_s, time.monotonic() - started)
