"""Images as directories: which packages jobs find, and what they see of the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_agent.errors import ConfigError, SandboxError
from gspo_agent.sandbox import Image, Sandbox, SandboxLimits, SandboxSettings
from gspo_agent.sandbox import sandbox as module
from gspo_agent.sandbox.image import sites
from gspo_agent.sandbox.inside.tree import Tree

OWN = f"python{sys.version_info[0]}.{sys.version_info[1]}"
LIMITS = SandboxLimits()


def package(place: Path, name: str) -> None:
    place.mkdir(parents=True)
    (place / f"{name}.py").write_text("x = 7\n")


async def test_unpacked_root_lends_its_packages_and_nothing_else(tmp_path: Path, sandbox: Sandbox) -> None:
    package(tmp_path / "usr/local/lib" / OWN / "site-packages", "local")
    package(tmp_path / "usr/lib/python3/dist-packages", "distributed")
    package(tmp_path / "testbed", "repository")
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "opt").symlink_to("/usr")
    assert [Path(site).relative_to(tmp_path).parts[0] for site in sites(str(tmp_path))] == ["usr", "usr"]
    image = Image(sandbox, str(tmp_path))
    code = "import local, distributed, importlib.util as u; print(local.x, distributed.x, u.find_spec('repository'))"
    result = await image.run({}, ["-c", code], LIMITS)
    assert result.output == b"7 7 None\n"
    files, left_out, commit = await image.repository("/testbed", LIMITS)
    assert (list(files), left_out, commit) == (["repository.py"], [], "")


async def test_shell_has_python_with_the_packages(tmp_path: Path, sandbox: Sandbox) -> None:
    package(tmp_path / "lib" / OWN / "site-packages", "it")
    command = "cd deep && python3 -c 'import it, top; print(it.x)' | tr 7 8; exit 3"
    files: Tree = {"top.py": ("file", b""), "deep/x": ("file", b"")}
    async with Sandbox(SandboxSettings("unsafe")) as unsafe:
        for own in (sandbox, unsafe):
            result = await Image(own, str(tmp_path)).run(files, command, LIMITS)
            assert (result.output, result.exit_code, result.changes) == (b"8\n", 3, {})


async def test_packages_of_another_version_are_refused_with_the_remedy(tmp_path: Path, sandbox: Sandbox) -> None:
    package(tmp_path / "lib/python3.2/site-packages", "old")
    message = 'has packages for Python 3.2, and jobs have .*Remedy: name an interpreter .*"/usr/bin/python3.2"'
    with pytest.raises(SandboxError, match=message):
        await Image(sandbox, str(tmp_path)).run({}, ["-c", "pass"], LIMITS)


@pytest.mark.parametrize(("name", "message"), [("none", "no such directory"), ("", "has no lib/python3")])
def test_what_is_no_image_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        sites(str(tmp_path / name))


async def test_servers_of_images_that_were_not_used_for_long_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_SERVERS", 1)
    for number in range(3):
        package(tmp_path / str(number) / "lib" / OWN / "site-packages", "it")
    async with Sandbox() as own:
        images = [Image(own, str(tmp_path / str(number))) for number in range(3)]
        with own.channel(image=images[0].name):
            await images[1].run({}, ["-c", "import it"], LIMITS)
            first, second = own.servers()
            assert (first.busy, second.busy) == (True, False)
            await images[2].run({}, ["-c", "import it"], LIMITS)
            assert (first.alive, second.alive) == (True, False)
