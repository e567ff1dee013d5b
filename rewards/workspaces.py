"""Changes of a repository against tests that they can neither read nor touch.

A task is a row {"image", "workdir", "base_commit", "problem_statement", "fail_to_pass", "pass_to_pass", "test_patch"}
and maybe {"setup", "patch", "timeout_s"}. The tests are those of the repository as it was, with `test_patch`; the
changes have their own copy of it. Both meet as a test file and its solution do (`gspo_agent.sandbox.testfile`): a job
that has the tests, in which the repository's modules are proxies, and another one that has the changes. So a change of
a test, of conftest.py, of pytest or of an installed package is a change of the wrong copy.

What that cannot carry makes the reference solution fail, and `gspo-agent check --tasks` says so: tests that share files
with the code, start it as a process, read its source, derive from its classes, or exchange objects of installed
packages with it; a repository whose modules are named as pytest's or the standard library's; plugins and settings of
pytest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from gspo_agent.errors import TaskError
from gspo_agent.sandbox import Image, Sandbox, SandboxLimits, TestFile
from gspo_agent.sandbox.inside import tree
from gspo_agent.sandbox.inside.tree import Changes, Tree
from gspo_agent.sandbox.testfile import PACKAGES
from rewards import test_files
from rewards.patch import PatchError, apply
from rewards.verdict import TestVerdict, Verdict, summary

_TEXTS = ("image", "workdir", "base_commit", "problem_statement", "test_patch")
_TIMEOUT_S = 60.0
_ROOM_BYTES, _ROOM_FILES = 32 << 20, 2000
_NO_MODULES = ("conftest", "setup")
_TEST_FOLDERS = ("test", "tests", "testing")


def limits_of(row: Mapping[str, Any]) -> SandboxLimits:
    """Of one command in a task's workspace, and of one test; `Repository.limits` says how large that may become."""
    seconds = float(row.get("timeout_s") or _TIMEOUT_S)
    return SandboxLimits(
        cpu_s=seconds,
        wall_s=3 * seconds + 5,
        memory_bytes=2 << 30,
        address_space_bytes=8 << 30,
        disk_bytes=1 << 30,
        files=100_000,
        processes=64,
    )


@dataclass(frozen=True, slots=True)
class Repository:
    """Where a task begins."""

    image: Image
    files: Tree
    limits: SandboxLimits
    left_out: list[str]

    @classmethod
    async def open(cls, row: Mapping[str, Any], sandbox: Sandbox, images: str | Path = "") -> Self:
        """Reads the repository, compares it with `base_commit` and runs `setup`, Python code, in it.

        `images`: the folder that relative names of images are in. TaskError names the field.
        """
        name = str(row["image"])
        image = Image(sandbox, name if sandbox.backend == "container" else str(Path(images) / name))
        limits = limits_of(row)
        files, left_out, commit = await image.repository(str(row["workdir"]), limits)
        found = commit or digest(files)
        if found != row["base_commit"]:
            raise TaskError(f"base_commit: is {row['base_commit']!r}, but {row['workdir']} of {name} is at {found!r}")
        if row.get("setup"):
            result = await image.run(files, ["-c", str(row["setup"])], limits)
            if result.status != "ok":
                said = result.output.decode("utf-8", "replace").strip().splitlines()[-1:]
                raise TaskError(f"setup: {result.status}: {''.join(said)}")
            files, left_out = tree.changed(files, result.changes), left_out + result.left_out
        # Every change is in the state of the episode.
        room = replace(limits, disk_bytes=tree.pages(files) + _ROOM_BYTES, files=tree.places(files) + _ROOM_FILES)
        return cls(image, files, room, left_out)


def digest(files: Tree) -> str:
    """What `base_commit` is where a repository has no `.git`: "tree:" and the SHA-256 of its files."""
    return f"tree:{sha256(tree.pack(dict(sorted(files.items())))).hexdigest()}"


def problem_of(row: Mapping[str, Any]) -> str | None:
    """What keeps a row from being a task."""
    for field in _TEXTS:
        if not isinstance(row.get(field), str) or not row[field]:
            return f"{field}: is {row.get(field)!r:.40}, not text"
    for field in ("fail_to_pass", "pass_to_pass"):
        tests = row.get(field)
        if not isinstance(tests, list) or not all(isinstance(test, str) and "::" in test for test in tests):
            return f"{field}: is not a list of tests such as 'tests/test_a.py::test_b'"
        if len(set(tests)) != len(tests):
            return f"{field}: has a test twice"
    if not row["fail_to_pass"]:
        return "fail_to_pass: is empty"
    seconds = row.get("timeout_s", _TIMEOUT_S)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        return f"timeout_s: is {seconds!r}, not CPU seconds above 0"
    return None


async def judge(
    changes: Changes, row: Mapping[str, Any], repository: Repository, *, deadline_s: float | None = None
) -> Verdict:
    """Every test of both lists, in the order of the lists, on the repository with `changes`.

    What the sandbox lost is an infra_error, a row that cannot be used a task_error. Of a sound row it is always the
    changes that are at fault, also where the tests cannot be run on them.
    """
    started = time.monotonic()
    wanted = [*row.get("fail_to_pass", ()), *row.get("pass_to_pass", ())]
    try:
        problem = problem_of(row)
        tests = {} if problem else apply(repository.files, row["test_patch"])
        modules = [] if problem else modules_of(row, repository.files)
        problem = problem or _impossible(wanted, tests, modules)
    except PatchError as error:
        problem = str(error)
    if problem:
        return Verdict("task_error", 0, len(wanted), problem, [], 0.0)
    solution = tree.changed(repository.files, changes)
    found: dict[str, TestVerdict] = {}
    for path in dict.fromkeys(_file(test) for test in wanted):
        own = _own(path, tests)
        file = TestFile(solution, modules, _without_code(tests, modules, own), path, _names(own))
        result = await repository.image.test(file, repository.limits, deadline_s)
        found |= test_files.by_id(result, [test for test in wanted if _file(test) == path])
    return summary([found[test] for test in wanted], len(wanted), 1000 * (time.monotonic() - started))


def modules_of(row: Mapping[str, Any], files: Tree) -> list[str]:
    """Names that are the repository's when its tests import them: its modules as they were, and those that the
    reference solution adds. Never what the changes add: that would stand in the place of an installed package."""
    after = {**files, **(apply(files, row["patch"]) if row.get("patch") else {})}
    wanted = {_file(test) for test in [*row["fail_to_pass"], *row["pass_to_pass"]]}
    folders = {path.split("/")[0] for path in wanted if "/" in path and not _is_inside(path, after)}
    names = {_module(path) for path in after if path.split("/")[0] not in folders}
    return sorted(name for name in names if name)


def _module(path: str) -> str:
    top, inside, _ = path.removeprefix("src/").partition("/")
    if not path.endswith(".py") or (not inside and top.startswith("test_")):
        return ""
    name = top if inside else top.removesuffix(".py")
    return name if name.isidentifier() and name not in _NO_MODULES else ""


def _is_inside(path: str, files: Tree) -> bool:
    """Whether a test file lies inside of a package that is not one of tests."""
    start = "src/" * path.startswith("src/")
    top = path.removeprefix(start).split("/")[0]
    return top not in _TEST_FOLDERS and f"{start}{top}/__init__.py" in files


def _own(path: str, tests: Tree) -> list[str]:
    """Of a test file inside of a package: what there is the tests' own. That is the outermost folder of tests, or else
    the file itself, and every conftest.py: pytest lets them decide."""
    if not _is_inside(path, tests):
        return []
    parts = path.split("/")
    ends = [end for end, part in enumerate(parts[:-1], 1) if part in _TEST_FOLDERS]
    found = ["/".join(parts[: ends[0]]) if ends else path]
    return found + [other for other in tests if other.endswith("/conftest.py") and _is_inside(other, tests)]


def _without_code(tests: Tree, modules: Sequence[str], own: Sequence[str]) -> Tree:
    """The files of the tests, without what they test: as it was, it would pass for what was made of it."""
    code = {
        path
        for path in tests
        if _module(path) in modules and not any(path == place or path.startswith(f"{place}/") for place in own)
    }
    packages: Tree = {path: ("file", b"") for path in code if path.endswith("/__init__.py")}
    return {path: file for path, file in tests.items() if path not in code} | packages


def _names(own: Sequence[str]) -> dict[str, str]:
    """As imports name them, and the directory of each."""
    names = {place.removesuffix(".py").removeprefix("src/").replace("/", "."): place for place in own}
    return {name: place.rpartition("/")[0] for name, place in names.items()}


def _file(test: str) -> str:
    return test.partition("::")[0]


def _impossible(wanted: Sequence[str], tests: Tree, modules: Sequence[str]) -> str | None:
    """Why the tests cannot be run from outside of what they test."""
    taken = sorted({*modules} & {*sys.stdlib_module_names, *PACKAGES})
    if taken:
        return f"the repository's module {taken[0]!r} has a name that the tests' own side needs"
    missing = [path for path in map(_file, wanted) if path not in tests]
    return f"{missing[0]}: there is no such file after test_patch" if missing else None
