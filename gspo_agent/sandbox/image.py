"""What a workspace's programs find installed: an image, and the repository that is in it.

For `ns` and `landlock` an image is a directory: a virtual environment, or the unpacked root of an OCI image. Its Python
packages are used, with the sandbox's interpreter, which has to be of their version; programs beside Python are this
machine's (`ns`) or none. For `container` an image is an OCI name, and all of it is used. Jobs see the packages, never
the rest of a directory: the repository enters a job as a tree of files, without its history.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_agent.errors import ConfigError, SandboxError
from gspo_agent.sandbox.channel import JobLost
from gspo_agent.sandbox.inside import tree
from gspo_agent.sandbox.inside.tree import Tree
from gspo_agent.sandbox.limits import SandboxLimits
from gspo_agent.sandbox.pressure import KILLED, is_suspect
from gspo_agent.sandbox.results import CommandResult
from gspo_agent.sandbox.testfile import TestFile, TestFileResult

if TYPE_CHECKING:
    from gspo_agent.sandbox.sandbox import Sandbox

_LIBRARIES = ("lib", "usr/local/lib", "usr/lib", "opt/*/lib")
_SITES = ("python3*/site-packages", "python3*/dist-packages")
_ATTEMPTS = 2


def sites(image: str) -> list[str]:
    """The directories of packages in an image's directory; ConfigError where there is none."""
    root = _root(image)
    found = [path.resolve() for above in _LIBRARIES for site in _SITES for path in sorted(root.glob(f"{above}/{site}"))]
    inside = [str(path) for path in dict.fromkeys(found) if path.is_dir() and path.is_relative_to(root)]
    if not inside:
        raise ConfigError(f"image {image!r} has no lib/{_SITES[0]}; make one with `python -m venv {image}`")
    return inside


def _root(image: str) -> Path:
    root = Path(image).resolve()
    if not root.is_dir():
        raise ConfigError(f"image {image!r}: no such directory; only sandbox.backend = 'container' takes OCI names")
    return root


def _repository(image: str, workdir: str, limits: SandboxLimits) -> tuple[Tree, list[str], str]:
    root = _root(image)
    directory = (root / workdir.lstrip("/")).resolve()
    if not directory.is_dir() or not directory.is_relative_to(root):
        raise ConfigError(f"image {image!r} has no directory {workdir!r}")
    found, left_out = tree.read(str(directory), limits.disk_bytes, limits.files)
    return found, left_out, tree.commit(str(directory))


class Image:
    """Runs commands and tests among the files of a workspace, each in a job of its own.

    Nothing is left of a job but what it says here: processes that a command started end with it.
    """

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        """`name`: a directory, or with the backend `container` an OCI name."""
        self.sandbox, self.name = sandbox, name

    @property
    def shell(self) -> bool:
        """Whether there is a shell: `ns` has one, in `landlock` and `container` a job is one process."""
        return self.sandbox.server(image=self.name).shell

    async def repository(self, workdir: str, limits: SandboxLimits) -> tuple[Tree, list[str], str]:
        """The files of `workdir` in the image, what was left out of them, and the commit they are at, or ""."""
        if self.sandbox.backend == "container":
            request = {"kind": "tree", "directory": workdir, "limits": limits.as_dict()}
            header, (packed,) = await self._ask(request, [], limits)
            return tree.changed({}, tree.unpack(packed)), header["left_out"], header["commit"]
        return await asyncio.to_thread(_repository, self.name, workdir, limits)

    async def run(self, files: Tree, command: Sequence[str] | str, limits: SandboxLimits) -> CommandResult:
        """Runs a command among `files`: arguments of Python, as `["-m", "pytest"]`, or the text of a shell command.

        SandboxError when the files are more than `limits` have room for, or when the job was lost.
        """
        request = {"kind": "command", "limits": limits.as_dict()}
        encoded = json.dumps(command if isinstance(command, str) else list(command)).encode()
        header, (output, packed) = await self._ask(request, [tree.pack(files), encoded], limits)
        return CommandResult(
            "runtime_error" if header["status"] == KILLED else header["status"],  # twice, and so by itself
            header["exit_code"],
            output,
            tree.unpack(packed),
            header["left_out"],
            header["cpu_s"],
        )

    async def test(self, file: TestFile, limits: SandboxLimits, deadline_s: float | None = None) -> TestFileResult:
        """As `Sandbox.test`, with the packages of the image on both sides."""
        return await self.sandbox.test(file, limits=limits, deadline_s=deadline_s, image=self.name)

    async def _ask(
        self, request: dict[str, Any], blobs: list[bytes], limits: SandboxLimits
    ) -> tuple[dict[str, Any], list[bytes]]:
        reason = "the job was lost"
        async with self.sandbox.turn():
            for attempt in range(_ATTEMPTS):
                with contextlib.suppress(JobLost), self.sandbox.channel(image=self.name) as channel:
                    await channel.send(request, *blobs)
                    header, answer = await channel.receive(5 * limits.wall_s + 60)
                    if header["status"] == "infra_error":
                        reason = header.get("reason", reason)
                    elif attempt or not is_suspect(header["status"], header.get("cpu_s", 0.0), limits.cpu_s):
                        return header, answer
        raise SandboxError(f"image {self.name!r}: {reason}")
