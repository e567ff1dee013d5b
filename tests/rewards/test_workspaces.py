"""Workspace tasks in a container's default confinement, and what is said of rows that are no sound tasks."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.sandbox import Image, Sandbox, SandboxLimits
from gspo_agent.sandbox.inside import tree
from gspo_agent.tasks.rows import read_path
from rewards.patch import apply
from rewards.workspace_checks import Finding, check_file, check_row, compare
from rewards.workspaces import Repository, digest, judge

FOLDER = Path(__file__).parents[2] / "examples" / "workspaces"
TASKS: dict[str, dict[str, Any]] = {row["id"]: row for _, row in read_path(FOLDER / "tasks.jsonl")}


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    """Where every user may read them."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        shutil.copytree(FOLDER / "image", f"{directory}/image")
        yield Path(directory)


async def test_one_process_a_job_is_enough_to_work_and_to_judge(contained: Sandbox, images: Path) -> None:
    task = TASKS["pages"]
    repository = await Repository.open(task, contained, images)
    assert not repository.image.shell
    found = await repository.image.run(repository.files, ["-m", "pytest", "-q", "tests"], repository.limits)
    assert b"2 passed" in found.output, found
    changes = tree.changes(repository.files, apply(repository.files, task["patch"]))
    assert (await judge({}, task, repository)).verdict == "wrong_answer"
    verdict = await judge(changes, task, repository)
    assert verdict.verdict == "pass", verdict


async def test_files_of_one_command_are_those_of_the_next(sandbox: Sandbox) -> None:
    image, limits = Image(sandbox, str(FOLDER / "image")), SandboxLimits()
    first = await image.run({}, ["-c", "open('a', 'w').write('1'); import os; os.mkdir('empty')"], limits)
    assert first.changes == {"a": ("file", b"1")}
    second = await image.run(tree.changed({}, first.changes), ["-c", "import os; os.remove('a')"], limits)
    assert second.changes == {"a": None}


def row(**changes: Any) -> dict[str, Any]:
    return {**TASKS["slugs"], **changes}


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (row(patch=""), "patch: is missing"),
        (row(patch="nonsense"), "patch: there is no diff in it"),
        (row(test_patch="nonsense"), "task_error: there is no diff in it"),
        (row(fail_to_pass=["tests/test_slugs.py::test_words"]), "test_words: is in fail_to_pass and passes without"),
        (row(pass_to_pass=["tests/test_slugs.py::test_nothing_is_left"]), "is in pass_to_pass and fails without"),
        (
            row(fail_to_pass=["tests/test_slugs.py::test_none"]),
            "test_none: fails with the reference solution: there is no",
        ),
        (row(fail_to_pass=["tests/other.py::test_x"]), "tests/other.py: there is no such file after test_patch"),
        (row(workdir="repositories"), "base_commit: is "),
    ],
)
async def test_row_that_is_no_task_is_refused_with_the_reason(
    task: dict[str, Any], problem: str, sandbox: Sandbox
) -> None:
    finding = await check_row("here", task, sandbox, FOLDER, times=1)
    assert len(finding.problems) == 1
    assert problem in finding.problems[0]


INSIDE = {
    "src/shapes/__init__.py": "from shapes.core import area\n",
    "src/shapes/core.py": "def area(side): return side + side\n",
    "src/shapes/conftest.py": "import pytest\n@pytest.fixture\ndef side(): return 3\n",
    "src/shapes/tests/__init__.py": "",
    "src/shapes/tests/numbers.py": "NINE = 9\n",
    "src/shapes/tests/test_core.py": (
        "from shapes.tests import numbers\nfrom .numbers import NINE\nfrom .. import core\nfrom ..core import area\n"
        "import shapes\nimport shapes.tests.numbers as direct\nfrom shapes import tests\n"
        "def test_area(side): assert area(side) == core.area(side) == NINE == numbers.NINE\n"
        "def test_direct(side): assert area(side) == direct.NINE\n"
        "def test_by_name(side): assert area(side) == shapes.tests.numbers.NINE\n"
        "def test_from(side): assert area(side) == tests.numbers.NINE\n"
        "def test_two(): assert area(2) == 4\n"
    ),
}
NO_TEST = "def test_area(): pass\ndef test_two(): pass\n"
HOOK = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem): return True\n"


async def test_tests_inside_of_the_package_are_their_own(sandbox: Sandbox) -> None:
    files: tree.Tree = {path: ("file", text.encode()) for path, text in INSIDE.items()}
    path = "src/shapes/tests/test_core.py"
    image = Image(sandbox, str(FOLDER / "image"))
    repository = Repository(image, {**files, path: ("file", NO_TEST.encode())}, SandboxLimits(), [])
    new = INSIDE[path].splitlines(keepends=True)
    task = row(
        fail_to_pass=[f"{path}::test_{name}" for name in ("area", "direct", "by_name", "from")],
        pass_to_pass=[f"{path}::test_two"],
        test_patch=f"--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,{len(new)} @@\n-"
        + NO_TEST.replace("\nd", "\n-d")
        + "".join(f"+{line}" for line in new),
        patch="",
    )

    async def judged(**changes: str) -> list[str]:
        names = {"core": "src/shapes/core.py", "test": path, "hook": "src/shapes/conftest.py"}
        names |= {"shapes": "src/shapes/__init__.py"}
        names |= {"init": "src/shapes/tests/__init__.py", "numbers": "src/shapes/tests/numbers.py"}
        verdict = await judge({names[key]: ("file", text.encode()) for key, text in changes.items()}, task, repository)
        return [test.verdict for test in verdict.tests]

    wrong = ["wrong_answer"] * 4 + ["pass"]
    assert await judged() == wrong
    assert await judged(core="def area(side): return side**2\n") == ["pass"] * 5
    assert await judged(test=NO_TEST, hook=HOOK, init=HOOK, numbers="NINE = 6\n") == wrong
    assert await judged(shapes="class tests:\n    class numbers: NINE = 6\n") == wrong


async def test_one_test_that_cannot_be_run_leaves_the_others_as_they_are(sandbox: Sandbox) -> None:
    tests = "import slugs\ndef test_a():\n    class A(slugs.B): pass\ndef test_b(): assert slugs.B().x == 1\n"
    files: tree.Tree = {"slugs.py": ("file", b"class B: x = 1\n")}
    test_patch = "--- /dev/null\n+++ b/tests/test_b.py\n@@ -0,0 +1,4 @@\n+" + tests.replace("\n", "\n+")[:-1]
    ids = [f"tests/test_b.py::test_{name}" for name in "ab"]
    repository = Repository(Image(sandbox, str(FOLDER / "image")), files, SandboxLimits(), [])
    verdict = await judge({}, row(test_patch=test_patch, patch="", fail_to_pass=ids, pass_to_pass=[]), repository)
    assert [test.verdict for test in verdict.tests] == ["wrong_answer", "pass"]


@pytest.mark.parametrize(
    ("hook", "said", "message"),
    [
        (HOOK, "runtime_error", "is not a hookable attribute"),
        ("x = 1", "wrong_answer", "cannot be a plugin of pytest: slugs.plugin"),
    ],
)
async def test_module_of_the_solution_as_a_plugin_makes_every_test_worthless(
    hook: str, said: str, message: str, sandbox: Sandbox
) -> None:
    files: tree.Tree = {
        "slugs/__init__.py": ("file", b""),
        "slugs/plugin.py": ("file", hook.encode()),
        "conftest.py": ("file", b"pytest_plugins = ['slugs.plugin']\n"),
        "tests/test_b.py": ("file", b"def test(): pass\n"),
    }
    test_patch = "--- /dev/null\n+++ b/tests/data\n@@ -0,0 +1 @@\n+x\n"
    repository = Repository(Image(sandbox, str(FOLDER / "image")), files, SandboxLimits(), [])
    task = row(test_patch=test_patch, patch="", fail_to_pass=["tests/test_b.py::test"], pass_to_pass=[])
    verdict = await judge({}, task, repository)
    assert verdict.verdict == said
    assert message in verdict.reason + verdict.tests[0].error


async def test_code_as_it_was_is_not_beside_the_tests(sandbox: Sandbox) -> None:
    """Or a test that starts it as a process would pass for ever."""
    hidden = (
        "import subprocess, sys\ndef test():\n"
        "    code = 'from slugs import slug; print(slug(\"A\"))'\n"
        "    assert subprocess.run([sys.executable, '-c', code], capture_output=True).stdout == b'a\\n'\n"
    )
    patch = "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,4 @@\n+" + hidden.replace("\n", "\n+")[:-1]
    task = row(fail_to_pass=["tests/test_new.py::test"], pass_to_pass=[], test_patch=patch)
    repository = await Repository.open(task, sandbox, FOLDER)
    assert (await judge({}, task, repository)).verdict == "wrong_answer"


async def test_changes_that_the_tests_cannot_be_run_on_are_wrong_and_no_fault_of_the_task(sandbox: Sandbox) -> None:
    hidden = (
        "import slugs\nclass Mine(getattr(slugs, 'Base', object)): pass\ndef test(): assert slugs.slug('A') == 'a'\n"
    )
    patch = "--- /dev/null\n+++ b/tests/test_base.py\n@@ -0,0 +1,3 @@\n+" + hidden.replace("\n", "\n+")[:-1]
    task = row(fail_to_pass=["tests/test_base.py::test"], pass_to_pass=[], test_patch=patch)
    repository = await Repository.open(task, sandbox, FOLDER)
    assert (await judge({}, task, repository)).verdict == "pass"
    text = b"class Base: pass\ndef slug(title): return title.lower()\n"
    verdict = await judge({"slugs/__init__.py": ("file", text)}, task, repository)
    assert (verdict.verdict, verdict.scored) == ("wrong_answer", True)
    assert "cannot derive a class from 'Base'" in verdict.reason


async def test_names_that_the_tests_side_needs_are_no_modules_of_a_repository(sandbox: Sandbox) -> None:
    repository = await Repository.open(TASKS["slugs"], sandbox, FOLDER)
    patch = (
        TASKS["slugs"]["patch"]
        + "diff --git a/json.py b/json.py\n--- /dev/null\n+++ b/json.py\n@@ -0,0 +1 @@\n+x = 1\n"
    )
    verdict = await judge({}, row(patch=patch), repository)
    assert verdict.reason == "the repository's module 'json' has a name that the tests' own side needs"


async def test_flaky_tests_are_listed(sandbox: Sandbox) -> None:
    task = TASKS["slugs"]
    repository = await Repository.open(task, sandbox, FOLDER)
    before = await judge({}, task, repository)
    after = await judge(tree.changes(repository.files, apply(repository.files, task["patch"])), task, repository)
    finding = Finding("slugs")
    compare(finding, task, [before, after, before], [after, after, after])
    assert finding.flaky == task["fail_to_pass"]
    finding = Finding("slugs")
    compare(finding, task, [before, before, before], [after, after, after])
    assert not finding.flaky + finding.problems


@pytest.mark.slow
async def test_our_ten_tasks_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check_file(FOLDER / "tasks.jsonl", times=1) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ok"] for line in lines] == [True] * 10
    assert sum(line["tests"] for line in lines) == 64


async def test_history_stays_outside_and_says_the_commit(tmp_path: Path, sandbox: Sandbox) -> None:
    shutil.copytree(FOLDER / "image", tmp_path / "image")
    git = tmp_path / "image/repositories/slugs/.git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n0123abcd refs/heads/main\n")
    (git / "solution").write_text("secret")
    repository = await Repository.open(row(base_commit="0123abcd"), sandbox, tmp_path)
    assert not any(path.startswith(".git") for path in repository.files)
    assert digest(repository.files) == TASKS["slugs"]["base_commit"]
    result = await repository.image.run(repository.files, "ls -a; ls -a / /site/0", repository.limits)
    assert b".git" not in result.output
    assert b"repositories" not in result.output
