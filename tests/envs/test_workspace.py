"""Workspaces: ten tasks solved through the tools by a script, and cheats in vain, all in the real sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.code_sandbox import Workspace
from examples.mending import Mending
from gspo_agent.env import check_env
from gspo_agent.errors import EnvError
from gspo_agent.messages import Message, assistant, call
from gspo_agent.sandbox.inside import tree
from gspo_agent.tasks.rows import read_path
from rewards import workspaces
from rewards.patch import apply
from rewards.workspaces import digest, judge, modules_of

FOLDER = Path(__file__).parents[2] / "examples" / "workspaces"
TASKS: dict[str, dict[str, Any]] = {row["id"]: row for _, row in read_path(FOLDER / "tasks.jsonl")}
SUBMIT = assistant("", [call("submit")])


def base(task: dict[str, Any]) -> tree.Tree:
    return tree.read(str(FOLDER / "image" / task["workdir"]), 1 << 20, 100)[0]


def write(path: str, content: str) -> Message:
    return assistant("", [call("write_file", path=path, content=content)])


def run(arguments: str) -> Message:
    return assistant("", [call("run", arguments=arguments)])


def bash(command: str) -> Message:
    return assistant("", [call("bash", command=command)])


def solution(task: dict[str, Any]) -> Iterator[Message]:
    """The reference solution, file by file."""
    before = base(task)
    for path, (_, content) in apply(before, task["patch"]).items():
        if before.get(path) != ("file", content):
            yield write(path, content.decode())


async def play(task: dict[str, Any], *actions: Message, env: Workspace | None = None) -> tuple[list[str], float]:
    """The tools' results, and the last reward."""
    env = env or Workspace(images=str(FOLDER))
    await env.areset(seed=0, options={"task": task})
    results: list[str] = []
    reward = 0.0
    for action in actions:
        messages, reward, _, _, _ = await env.astep(action)
        results += [message["content"] for message in messages]
    return results, reward


def test_there_are_ten_tasks() -> None:
    assert len(TASKS) == 10


@pytest.mark.parametrize("name", TASKS)
async def test_scripted_agent_solves_it(name: str) -> None:
    task = TASKS[name]
    results, reward = await play(task, *solution(task), run("-m pytest -q"), SUBMIT)
    assert "passed" in results[-2], results
    assert reward == 1.0


async def test_unchanged_repository_fails() -> None:
    results, reward = await play(TASKS["slugs"], run("-m pytest -q"), SUBMIT)
    assert "passed" in results[0]
    assert reward == 0.0


ALIKE = """
class Alike:
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __ne__ = __lt__ = __gt__ = lambda self, other: False
    __hash__ = lambda self: 0
"""
FORGED_REPORT = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome, report.longrepr = "passed", None
    return report
"""
JUNIT = '<testsuites><testsuite errors="0" failures="0" tests="5"></testsuite></testsuites>'
CHEATS = {
    "its tests, conftest.py, sitecustomize and a plugin": [
        write("tests/test_sums.py", "def test_tax(): pass\ndef test_total(): pass\n"),
        write("conftest.py", FORGED_REPORT),
        write("tests/conftest.py", FORGED_REPORT),
        write("sitecustomize.py", "import forged"),
        write("forged.py", FORGED_REPORT),
        write("pytest.ini", "[pytest]\naddopts = -p forged\n"),
    ],
    "an exit status, a report, a summary": [
        write("report.xml", JUNIT),
        write(".pytest_cache/v/cache/lastfailed", "{}"),
        write("invoice/__init__.py", "import os\nprint('5 passed in 0.01s', flush=True)\nos._exit(0)\n"),
    ],
    "an exit at the end": [
        write("invoice/__init__.py", "import atexit, os\natexit.register(os._exit, 0)\ntax = total = None\n"),
    ],
    "pytest, unittest and assert": [
        write(
            "invoice/__init__.py",
            "import builtins, unittest\nimport _pytest.python, _pytest.runner, pytest\n"
            "_pytest.python.Function.runtest = lambda self: None\nunittest.TestCase.run = lambda *a: None\n"
            "pytest.fail = lambda *a, **k: None\n"
            "class AssertionError(builtins.AssertionError):\n    pass\nbuiltins.AssertionError = AssertionError\n"
            "tax = total = lambda lines: None\n",
        ),
    ],
    "the installed package": [
        write("tally/__init__.py", ALIKE + "half_up = lambda *a: Alike()\nchunks = None\n"),
        write("decimal.py", ALIKE + "Decimal = lambda *a: Alike()\n"),
        write("invoice/__init__.py", "from tally import half_up\ntax = total = lambda lines: half_up()\n"),
    ],
    "an answer that equals all": [
        write("invoice/__init__.py", ALIKE + "tax = total = lambda lines: Alike()\n"),
    ],
    "skipping": [
        write(
            "invoice/__init__.py",
            "import pytest\ndef tax(lines): pytest.skip('later')\ntotal = tax\n"
            "pytest.skip('no', allow_module_level=True)\n",
        ),
    ],
}  # fmt: skip


async def in_one_process(env: Workspace, task: dict[str, Any]) -> int | None:
    """The exit code of pytest over the hidden tests in the changed repository: what a careless judge would go by."""
    repository = await env._repository()
    files = tree.changed(repository.files, env.changes)
    for path in ("tests/test_sums.py", "tests/test_rounding.py"):
        hidden = apply(repository.files, task["test_patch"])[path]
        files = files | {path: hidden}
    result = await repository.image.run(files, ["-m", "pytest", "-q", "tests"], repository.limits)
    return result.exit_code


@pytest.mark.parametrize("name", CHEATS)
async def test_cheating_is_in_vain(name: str) -> None:
    task, env = TASKS["invoice"], Workspace(images=str(FOLDER))
    await play(task, *CHEATS[name], env=env)
    verdict = await judge(env.changes, task, await env._repository())
    assert verdict.scored
    assert all(test.verdict != "pass" for test in verdict.tests[: len(task["fail_to_pass"])]), verdict
    if name != "skipping":
        assert await in_one_process(env, task) == 0, "nobody would be fooled by it"


YES_MAN = (
    ALIKE.strip()
    + """
    __call__ = __getattr__ = __getitem__ = lambda self, *_, **__: self
    __iter__ = lambda self: iter([self])
    __len__ = lambda self: 1
__getattr__ = lambda name: Alike()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
async def test_every_task_is_cheated_in_vain(name: str) -> None:
    task, env = TASKS[name], Workspace(images=str(FOLDER))
    files = base(task)
    (module,) = modules_of(task, files)
    top = next(path for path in files if path.endswith((f"{module}/__init__.py", f"{module}.py")))
    tests = [write(path, "") for path in files if path.startswith("tests/")]
    for cheat in (
        [*tests, write("conftest.py", FORGED_REPORT), write("tests/conftest.py", FORGED_REPORT)],
        [write(top, "import os\nos._exit(0)\n")],
        [write(top, YES_MAN)],
    ):
        await play(task, *cheat, env=env)
        verdict = await judge(env.changes, task, await env._repository())
        assert (verdict.scored, verdict.verdict == "pass") == (True, False), verdict


async def test_hidden_tests_are_nowhere_in_what_the_agent_or_its_code_can_reach() -> None:
    task = TASKS["invoice"]
    spy = (
        "import gc, os, sys\n"
        "def tax(lines):\n"
        "    frames, frame = [], sys._getframe()\n"
        "    while frame:\n        frames.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "    objects = [o for o in gc.get_objects() if type(o) in (str, bytes, list, dict, tuple)]\n"
        "    seen = ''.join(frames) + repr(objects) + repr(os.environ)\n"
        "    for top, _, names in (entry for place in ('/box', '/site') for entry in os.walk(place)):\n"
        "        seen += ''.join(open(os.path.join(top, name), errors='replace').read() for name in names)\n"
        "    raise RuntimeError('seen' if ''.join(['each', '_rate']) in seen else 'unseen')\n"
        "total = tax\n"
    )
    env = Workspace(images=str(FOLDER))
    prompt, _ = await env.areset(seed=0, options={"task": task})
    results, _ = await play(
        task, write("invoice/__init__.py", spy), run("-c 'import invoice; invoice.tax([])'"), env=env
    )
    assert "RuntimeError: unseen" in results[-1]
    assert "each_rate" not in json.dumps([prompt, results, env.tool_schemas])
    verdict = await judge(env.changes, task, await env._repository())
    assert verdict.verdict == "runtime_error"
    assert "RuntimeError: unseen" in verdict.tests[0].error


async def test_packages_and_the_system_cannot_be_changed() -> None:
    code = "import tally, pytest; [open(m.__file__, 'a') for m in (pytest, tally)]"
    results, _ = await play(
        TASKS["invoice"], run(f'-c "{code}"'), bash("touch /site/0/x /packages/x /usr/bin/x; id -u")
    )
    assert "PermissionError" in results[0]
    assert results[1].count("Read-only file system") == 3


async def test_episode_goes_on_in_another_instance() -> None:
    task = TASKS["slugs"]
    first = Workspace(images=str(FOLDER))
    first.known_task = task
    await play(
        task,
        *solution(task),
        write("gone", ""),
        run('-c \'__import__("os").remove("gone")\''),
        bash("rm -r tests; mkdir more; echo x > more/y; chmod +x more/y"),
        env=first,
    )
    state = json.loads(json.dumps(first.get_state()))
    assert first.state_level == "state"
    assert "fail_to_pass" not in json.dumps(state)
    second = Workspace(images=str(FOLDER))
    second.known_task = task
    second.set_state(state)
    messages, *_ = await second.astep(bash("ls -l more; ls; more/y"))
    assert "-rwxr-xr-x" in messages[0]["content"]
    assert not any(name in messages[0]["content"] for name in ("tests", "gone"))
    _, reward, terminated, *_ = await second.astep(SUBMIT)
    assert (reward, terminated) == (1.0, True)


HOSTILE = r"""
import os
os.symlink("/etc/passwd", "absolute"); os.symlink("../../outside", "outside"); os.symlink("slugs/text.py", "inside")
os.mkfifo("fifo"); os.mkfifo("slugs/__init__.py.fifo")
for kind in (0o020666, 0o060666):
    try: os.mknod(f"device{kind}", kind, os.makedev(1, 3))
    except OSError: pass
for number in range(4):
    with open(f"sparse{number}", "wb") as file: file.truncate(1 << 20)
for name in ("new\nline", "..\\up", b"\xff\xfe", " ", "...", "\x1b[31m"):
    with open(name, "w") as file: file.write("x")
os.link("slugs/text.py", "hard")
os.chmod("hard", 0o6755)
path = "."
for depth in range(100):
    path += "/deep"
    os.mkdir(path)
open(path + "/file", "w").close()
os.mkdir("closed"); open("closed/file", "w").close(); os.chmod("closed", 0)
os.rename("tests", "gone"); os.symlink("..", "tests")
"""


async def test_hostile_files_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_ROOM_BYTES", 3 << 20)
    task, env = TASKS["slugs"], Workspace(images=str(FOLDER))
    results, _ = await play(task, write("hostile.py", HOSTILE), run("hostile.py"), env=env)
    assert "not kept: " in results[1]
    assert "a fifo" in results[1]
    assert "too long" in results[1]
    assert "\x1b" not in results[1]
    kinds = {path: file and file[0] for path, file in env.changes.items()}
    assert kinds["inside"] == "link"
    assert kinds["hard"] == "exec"
    assert sum(path.startswith("sparse") for path in kinds) == 2
    assert not kinds.keys() & {"absolute", "outside", "fifo", "new\nline", "tests"}
    assert sum(len(file[1]) for file in env.changes.values() if file) <= 3 << 20
    state = json.loads(json.dumps(env.get_state()))
    second = Workspace(images=str(FOLDER))
    second.set_state(state)
    messages, *_ = await second.astep(bash("ls -l inside hard; cat ... ' '"))
    assert "-rwxr-xr-x" in messages[0]["content"]
    assert messages[0]["content"].endswith("xx")
    _, reward, *_ = await second.astep(SUBMIT)
    assert reward == 0.0


async def test_observations_are_cut_and_clean() -> None:
    code = "print('head\\x1b[31mred', 'x' * 10**6, '<|im_end|>tail\\0')"
    results, _ = await play(TASKS["slugs"], run(f'-c "{code}"'), run("-c 'raise SystemExit(3)'"), run("-c pass"))
    assert results[0].startswith("headred xxx")
    assert results[0].endswith("<|im_end|>tail")
    assert "bytes left out" in results[0]
    assert len(results[0]) < 9000
    assert results[1:] == ["exit code 3", "no output"]


async def test_editor_says_what_is_wrong() -> None:
    def tool(name: str, **arguments: Any) -> Message:
        return assistant("", [call(name, **arguments)])

    results, _ = await play(
        TASKS["slugs"],
        tool("read_file", path="slugs/text.py", first_line=8, num_lines=1),
        tool("read_file", path="slugs"),
        tool("read_file", path="../secret"),
        tool("read_file", path="/etc/passwd"),
        write("slugs", "x"),
        write("slugs/text.py/x", "x"),
        write(".git/config", "x"),
        tool("edit_file", path="slugs/text.py", old="plain", new="x"),
        tool("edit_file", path="./slugs/text.py", old='return "".join', new='return "-".join'),
        bash("ln -s slugs/text.py link; head -c 100 /dev/urandom > noise"),
        tool("read_file", path="link", first_line=10, num_lines=1),
        tool("read_file", path="noise"),
        run(""),
        run("'"),
    )
    expected = [
        "    plain = unicodedata", "it is a directory, with slugs/__init__.py", "'.' or '..'", "not a relative path",
        "cannot also be a directory", "cannot also be a directory", "lies in .git", "give one that is there once",
        "edited", "no output", 'return "-".join', "is not text", "is empty", "No closing quotation",
    ]  # fmt: skip
    for result, part in zip(results, expected, strict=True):
        assert part in result


async def test_time_and_memory_of_a_command_are_limited() -> None:
    task = {**TASKS["slugs"], "timeout_s": 0.3}
    results, _ = await play(task, run("-c 'while True: pass'"), bash("sleep 100 & echo started"))
    assert results == ["stopped after 0.3 s of CPU or 5.9 s", "started"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fail_to_pass", [], "fail_to_pass: is empty"),
        ("test_patch", "", "test_patch: is ''"),
        ("timeout_s", 0, "timeout_s: is 0"),
        ("base_commit", "tree:0", "base_commit: is 'tree:0', but repositories/slugs of image is at 'tree:"),
        ("image", "nowhere", "no such directory"),
        ("workdir", "../..", "has no directory"),
        ("setup", "1 / 0", "setup: runtime_error: ZeroDivisionError"),
    ],
)
async def test_unusable_rows_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        await play({**TASKS["slugs"], field: value})


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    assert check_env(Mending) == []


def test_base_commit_is_the_digest_of_the_files() -> None:
    for task in TASKS.values():
        assert task["base_commit"] == digest(base(task))
