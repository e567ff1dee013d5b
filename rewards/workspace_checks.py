"""Whether workspace tasks are what their rows say (`gspo-agent check --tasks`).

Each is judged without a change and with its reference solution, several times.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from gspo_agent.errors import ConfigError, SandboxError
from gspo_agent.sandbox import Sandbox, SandboxSettings
from gspo_agent.sandbox.inside import tree
from gspo_agent.tasks.rows import BadRow, read_path
from rewards.patch import PatchError, apply
from rewards.verdict import Verdict
from rewards.workspaces import Repository, judge, problem_of


@dataclass(slots=True)
class Finding:
    """What came of one row."""

    id: str
    problems: list[str] = field(default_factory=list)
    """One line each; of a task that can be trained on there are none."""
    flaky: list[str] = field(default_factory=list)
    """Tests that came out differently from one time to the next."""
    tests: int = 0

    def line(self) -> str:
        ok = not (self.problems or self.flaky)
        said = {"id": self.id, "ok": ok, "tests": self.tests, "problems": self.problems, "flaky": self.flaky}
        return json.dumps(said, ensure_ascii=False)


async def check_file(path: Path, images: Path | None = None, backend: str = "auto", times: int = 3) -> int:
    """Prints one JSON object for each row as soon as it is checked, and the count on standard error. Returns how many
    rows are no sound tasks.

    Args:
        images: the folder that relative names of images are in; None: that of the file.
        times: how often each row is judged, without a change and with its reference solution.
    """
    rows = list(read_path(path))
    places = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    bad = 0

    async def checked(place: str, row: Any) -> None:
        nonlocal bad
        async with places:
            finding = await check_row(place, row, sandbox, path.parent if images is None else images, times)
        bad += bool(finding.problems or finding.flaky)
        sys.stdout.write(finding.line() + "\n")
        sys.stdout.flush()

    settings = SandboxSettings(backend=cast(Any, backend))
    async with await Sandbox.open(settings) as sandbox, asyncio.TaskGroup() as group:
        for place, row in rows:
            group.create_task(checked(place, row))
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"{len(rows)} tasks checked, {bad} not sound")
    return bad


async def check_row(place: str, row: Any, sandbox: Sandbox, images: Path | str, times: int) -> Finding:
    """Everything that is wrong with one row."""
    if isinstance(row, BadRow) or not isinstance(row, Mapping):
        return Finding(place, [str(row) if isinstance(row, BadRow) else f"row: is {type(row).__name__}, not an object"])
    finding = Finding(str(row.get("id", row.get("instance_id", place))))
    problem = problem_of(row)
    if not problem and not row.get("patch"):
        problem = "patch: is missing; it is the reference solution that the task is checked with"
    if problem:
        finding.problems.append(problem)
        return finding
    try:
        repository = await Repository.open(row, sandbox, images)
        reference = tree.changes(repository.files, apply(repository.files, str(row["patch"])))
        without = [await judge({}, row, repository) for _ in range(times)]
        with_it = [await judge(reference, row, repository) for _ in range(times)]
    except (ConfigError, SandboxError) as error:
        finding.problems.append(str(error))
        return finding
    except PatchError as error:
        finding.problems.append(f"patch: {error}")
        return finding
    finding.problems += [f"left out of the repository: {line}" for line in repository.left_out]
    compare(finding, row, without, with_it)
    return finding


def compare(finding: Finding, row: Mapping[str, Any], without: Sequence[Verdict], with_it: Sequence[Verdict]) -> None:
    """Adds to `finding` what the verdicts of one row say of it."""
    unscored = [verdict for verdict in [*without, *with_it] if not verdict.scored]
    if unscored:
        finding.problems.append(f"{unscored[0].verdict}: {unscored[0].reason}")
        return
    wanted = [*row["fail_to_pass"], *row["pass_to_pass"]]
    finding.tests = len(wanted)
    for position, test in enumerate(wanted):
        before = {verdict.tests[position].verdict == "pass" for verdict in without}
        after = {verdict.tests[position].verdict == "pass" for verdict in with_it}
        if len(before) > 1 or len(after) > 1:
            finding.flaky.append(test)
        elif after == {False}:
            finding.problems.append(f"{test}: fails with the reference solution: {_why(with_it[0], position)}")
        elif position < len(row["fail_to_pass"]) and before == {True}:
            finding.problems.append(f"{test}: is in fail_to_pass and passes without a change")
        elif position >= len(row["fail_to_pass"]) and before == {False}:
            finding.problems.append(
                f"{test}: is in pass_to_pass and fails without a change: {_why(without[0], position)}"
            )


def _why(verdict: Verdict, position: int) -> str:
    """Here nothing is hidden: whoever checks tasks may see what they expect."""
    test = verdict.tests[position]
    lines = test.error.strip().splitlines()
    return f"{test.reason}: {lines[-1]}" if lines else test.reason
