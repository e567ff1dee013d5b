"""Workspace: mend a repository with a shell, Python and an editor; hidden tests decide."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import ConfigError, EnvError, SandboxError, ToolError, Unscored
from gspo_agent.sandbox import CommandResult, readable, shared_sandbox
from gspo_agent.sandbox.inside import tree
from gspo_agent.sandbox.inside.tree import Changes, File, Tree
from rewards.workspaces import Repository, judge, problem_of

_BEGINNING = ("image", "workdir", "base_commit", "setup", "timeout_s")
_SHOWN_FILES, _SHOWN_LEFT_OUT, _MAX_LINKS = 40, 5, 8
_TASK = """{problem}

The repository is in the working directory. Change it so that the problem is gone, and call submit. These are some of \
its files:
{files}"""


class Workspace(ToolEnv):
    """A repository with something wrong in it; tests that the model never sees say when it is right.

    Tasks are rows as `rewards.workspaces` explains them. Every command runs in a sandbox of its own, among the files
    as they are by then, and what it changes in them is kept; processes that it starts end with it. The state is the
    files that differ from the repository. The score is 1 when every test of both lists passes.
    """

    def __init__(self, images: str = "") -> None:
        """`images`: the folder that the relative names of images are in; "": the working directory."""
        self.images = images
        self._repositories: list[Repository] = []
        """At most one; no part of the state."""

    async def setup(self, task: dict[str, Any]) -> None:
        if problem := problem_of(task):
            raise EnvError(f"Workspace: {problem}")
        self._repositories.clear()
        self.beginning = {field: task[field] for field in _BEGINNING if field in task}
        self.changes: Changes = {}
        await self._repository()

    async def prompt(self, task: dict[str, Any]) -> str:
        return question(task, (await self._repository()).files)

    async def tools(self) -> list[Any]:
        """All of them, or all but `bash` where the sandbox has no shell."""
        shell = (await self._repository()).image.shell
        return [self.run, self.read_file, self.write_file, self.edit_file, *([self.bash] if shell else []), self.submit]

    @tool
    async def run(self, arguments: str) -> str:
        """Run Python in the repository.

        Args:
            arguments: As after `python`: `-m pytest tests`, `-c "print(1)"`, or a file and its arguments.
        """
        try:
            command = shlex.split(arguments)
        except ValueError as error:
            raise ToolError(f"arguments: {error}") from None
        if not command:
            raise ToolError("arguments: is empty; write what follows `python`, such as -m pytest")
        return await self._execute(command)

    @tool
    async def bash(self, command: str) -> str:
        """Run a shell command in the repository. Background processes end with it."""
        return await self._execute(command)

    @tool(idempotent=True)
    async def read_file(self, path: str, first_line: int = 1, num_lines: int = 200) -> str:
        """Read a part of a file."""
        path, file = self._found(path, await self._files())
        lines = self._text(path, file).splitlines(keepends=True)
        first = max(first_line, 1)
        part = "".join(lines[first - 1 : first - 1 + max(num_lines, 1)])
        if not part:
            return f"{path} has {len(lines)} lines"
        rest = len(lines) - (first - 1 + max(num_lines, 1))
        return readable(part.encode()) + (f"\n... {rest} more lines" if rest > 0 else "")

    @tool
    async def write_file(self, path: str, content: str) -> str:
        """Write a whole file; directories are made."""
        files = await self._files()
        path = self._resolved(path, files)
        above = ["/".join(path.split("/")[:end]) for end in range(1, path.count("/") + 1)]
        if any(part in files for part in above) or any(other.startswith(f"{path}/") for other in files):
            raise ToolError(f"{path}: a file cannot also be a directory")
        await self._keep(path, content, files)
        return "written"

    @tool
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a part of a file that is in it once."""
        files = await self._files()
        path, file = self._found(path, files)
        text = self._text(path, file)
        found = text.count(old) if old else 0
        if found != 1:
            raise ToolError(f"{path}: the old part is in it {found} times; give one that is there once")
        await self._keep(path, text.replace(old, new), files)
        return "edited"

    @tool(final=True)
    async def submit(self) -> str:
        """Hand in the repository as it is now."""
        return "submitted"

    async def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        verdict = await judge(self.changes, task, await self._repository())
        if not verdict.scored:
            raise Unscored(f"Workspace: {verdict.verdict}: {verdict.reason}")
        return {"passed": float(verdict.verdict == "pass")}

    async def _repository(self) -> Repository:
        if not self._repositories:
            try:
                self._repositories.append(await Repository.open(self.beginning, shared_sandbox(), self.images))
            except ConfigError as error:  # one bad row is no reason to end a run
                raise EnvError(f"Workspace: {error}") from error
        return self._repositories[0]

    async def _files(self) -> Tree:
        return tree.changed((await self._repository()).files, self.changes)

    async def _execute(self, command: Sequence[str] | str) -> str:
        repository, files = await self._repository(), await self._files()
        try:
            result = await repository.image.run(files, command, repository.limits)
        except SandboxError as error:
            raise EnvError(f"Workspace: {error}") from error
        self._take(repository, tree.changed(files, result.changes))
        return _shown(result, repository)

    async def _keep(self, path: str, text: str, files: Tree) -> None:
        repository = await self._repository()
        kind = files.get(path, ("file", b""))[0]
        after = {**files, path: (kind, text.encode("utf-8", "replace"))}
        limits = repository.limits
        if tree.places(after) > limits.files or tree.pages(after) > limits.disk_bytes:
            most = f"{limits.disk_bytes >> 20} MiB or {limits.files} files and directories"
            raise ToolError(f"{path}: the workspace would be larger than {most}")
        self._take(repository, after)

    def _take(self, repository: Repository, files: Tree) -> None:
        self.changes = tree.changes(repository.files, files)

    def _found(self, path: str, files: Tree) -> tuple[str, File]:
        path = self._resolved(path, files)
        if path not in files:
            inside = sorted(other for other in files if other.startswith(f"{path}/") or path == ".")[:_SHOWN_FILES]
            hint = f"; it is a directory, with {', '.join(inside)}" if inside else ""
            raise ToolError(f"{path}: there is no such file{hint}")
        return path, files[path]

    def _resolved(self, path: str, files: Tree) -> str:
        """The path of the file itself, where links lead to it."""
        place = posixpath.normpath(path)
        for _ in range(_MAX_LINKS):
            if place == ".":
                return place
            if problem := tree.path_problem(place):
                raise ToolError(f"path {path!r:.200} {problem}; give one in the repository")
            kind, target = files.get(place, ("file", b""))
            if kind != "link":
                return place
            place = posixpath.normpath(posixpath.join(posixpath.dirname(place), target.decode()))
        raise ToolError(f"{path}: too many links")

    def _text(self, path: str, file: File) -> str:
        try:
            return file[1].decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path}: is not text; it has {len(file[1])} bytes") from None


def question(task: Mapping[str, Any], files: Tree) -> str:
    """What the model reads of a task."""
    names = sorted(files)
    shown = names[:_SHOWN_FILES] + [f"... and {len(names) - _SHOWN_FILES} more"] * (len(names) > _SHOWN_FILES)
    return _TASK.format(problem=str(task["problem_statement"]).strip(), files="\n".join(shown))


def _shown(result: CommandResult, repository: Repository) -> str:
    limits = repository.limits
    ended = {
        "time_limit": f"stopped after {limits.cpu_s:g} s of CPU or {limits.wall_s:g} s",
        "memory_limit": f"stopped above {limits.memory_bytes >> 20} MiB",
        "output_limit": f"stopped: more than {limits.output_bytes} bytes in one file or of output",
    }.get(result.status, f"exit code {result.exit_code}" if result.exit_code else "")
    known = set(repository.left_out)
    left_out = [line for line in result.left_out if line not in known]
    more = [f"and {len(left_out) - _SHOWN_LEFT_OUT} more"] * (len(left_out) > _SHOWN_LEFT_OUT)
    notes = [f"not kept: {line}" for line in left_out[:_SHOWN_LEFT_OUT] + more]
    output = readable(result.output).rstrip("\n")
    return "\n".join(filter(None, [output, ended, *notes])) or "no output"
