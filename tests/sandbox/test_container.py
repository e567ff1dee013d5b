"""The backend `container`, without a daemon: `tests.sandbox.pretended_docker` does what it can of the command line."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_agent.config import Config
from gspo_agent.errors import ConfigError, SandboxError
from gspo_agent.sandbox import Image, Sandbox, SandboxLimits, SandboxSettings, TestFile, container
from gspo_agent.sandbox.probe import NotIsolated
from tests.sandbox import confinement, survivors

SETTINGS = SandboxSettings("container", "python3.12", "python:3.12-slim", "podman")
MINIMAL = {"model": "x", "env": [{"id": "a:B"}], "run": {"dir": "r"}}


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> SandboxSettings:
    python = confinement.interpreter()
    if os.getuid() != 0 or shutil.which("unshare") is None or python is None:
        pytest.skip("pretending takes root, unshare, and a Python that every user may run")
    script = tmp_path_factory.mktemp("bin") / "docker"
    run = f"PYTHONPATH={confinement.ROOT} exec unshare --mount --propagation private {sys.executable} -B -m"
    script.write_text(f'#!/bin/sh\n{run} tests.sandbox.pretended_docker "$@"\n')
    script.chmod(0o755)
    return SandboxSettings("container", python, "image", str(script))


def test_command_line_has_every_wall_and_nothing_of_the_host_but_the_harness(tmp_path: Path) -> None:
    line = container.command(SETTINGS, "name", tmp_path, ["/lib/pytest"], ["-s", "-c", "code"])
    flags = " ".join(line[: line.index("python:3.12-slim")])
    assert flags.startswith("podman run --rm --read-only --name name ")
    for flag in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 65534:65534",
        "--pids-limit ",
        "--memory ",
        "--memory-swap ",
        "--entrypoint python3.12",
        "--tmpfs /tmp:rw,nosuid,nodev,",
    ):
        assert flag in flags
    mounts = [line[place + 1] for place, part in enumerate(line) if part == "--mount"]
    assert len(mounts) == 3
    writable = [mount for mount in mounts if not mount.endswith(",readonly")]
    assert writable == [f"type=bind,src={tmp_path},dst=/run/gspo/control"]
    assert line[-3:-1] == ["-s", "-c"]
    assert line[-1].endswith("code")


async def test_jobs_of_a_container_run_and_nothing_is_left(docker: SandboxSettings) -> None:
    own = Sandbox(docker)
    server = own.server()
    assert server.backend == "container"
    code = "import os\nprint(input(), os.getuid(), os.path.exists('/run/gspo/control/socket'), sorted(os.environ))"
    result = await own.run(code, stdin="hi")
    assert result.stdout.decode().startswith("hi 65534 False ['HOME'"), result.stderr
    assert "SECRET" not in result.stdout.decode()
    stolen = await own.run("print(open('/run/gspo/code/inside/forkserver.py').read())")
    assert b"PermissionError" in stolen.stderr
    (call,) = await own.call_many("def f(x): return x + 1", "f", [[1]])
    assert call.value == 2
    async with await own.session() as session:
        assert (await session.cell("6 * 7")).output == "42\n"
    below = survivors.descendants(server.pid)
    await own.close()
    assert not survivors.alive(below)


@pytest.fixture
def repository() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        (place / "shapes.py").write_text("def area(): return 3\n")
        (place / ".git").mkdir()
        (place / ".git" / "HEAD").write_text("0123abcd\n")
        yield directory


async def test_a_workspace_is_read_and_worked_in_where_the_image_has_it(
    docker: SandboxSettings, repository: str
) -> None:
    async with Sandbox(docker) as own:
        image, limits = Image(own, "task-image"), SandboxLimits()
        files, left_out, commit = await image.repository(repository, limits)
        assert (files, left_out, commit) == ({"shapes.py": ("file", b"def area(): return 3\n")}, [], "0123abcd")
        assert not image.shell
        code = "import shapes; open('new', 'w').write(str(shapes.area()))"
        result = await image.run(files, ["-c", code], limits)
        assert (result.output, result.changes) == (b"", {"new": ("file", b"3")})
        hidden = {"test_it.py": ("file", b"import shapes\ndef test(): assert shapes.area() == 3\n")}
        found = await image.test(TestFile(files, ["shapes"], hidden, "test_it.py"), limits)
        assert [test["class"] for test in found.report["tests"]] == ["pass"]


async def test_test_files_are_judged_in_a_container(docker: SandboxSettings) -> None:
    async with Sandbox(docker) as own:
        tests = "from solution import add\ndef test_add(): assert add(1, 2) == 3"
        result = await own.test_file("def add(a, b): return a + b", tests, module="solution")
    assert result.status == "ok", result


def test_what_docker_says_is_said_with_the_remedy(docker: SandboxSettings) -> None:
    missing = SandboxSettings("container", docker.python, "missing", docker.command)
    with pytest.raises(NotIsolated, match=r"by container: .* run: docker: .* No such image: missing\..*Remedy: look"):
        Sandbox(missing).server()
    with pytest.raises(SandboxError, match=r"Remedy: install no-such-docker, or set sandbox\.command"):
        Sandbox(SandboxSettings("container", "", "image", "no-such-docker")).server()


def test_container_is_never_chosen_without_an_image() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        Config.parse({**MINIMAL, "sandbox": {"backend": "container"}})
    with pytest.raises(ConfigError, match="belong together"):
        Config.parse({**MINIMAL, "sandbox": {"image": "python:3.12-slim"}})
