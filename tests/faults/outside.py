"""What a run leaves outside of its directory: lines in files that no kill, full disk or rollback takes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_TOOL = 'echo "$0 $$ $1" >> {log}; sleep {seconds}; echo done'
"""The effect comes first, as it would where a tool is killed after it."""


class Outside:
    """The files of one run. Every line is one write, so a process that dies leaves whole lines.

    calls    CALL_ID PID TOOL                    a tool ran (PID 0: inside the trainer)
    tokens   REQUEST POSITION COUNT VERSION      the engine sampled
    weights  VERSION FINGERPRINT                 the engine took weights
    learner  begun STEP | trained STEP ID,...    the learner was made, restored to STEP; it trained on groups
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, int] = {}

    def write(self, name: str, *words: object) -> None:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._files[name], (" ".join(map(str, words)) + "\n").encode())

    def read(self, name: str, start: int = 0) -> Iterator[list[str]]:
        """The words of every line from byte `start` on."""
        path = self.folder / name
        if not path.exists():
            return
        with path.open() as file:
            file.seek(start)
            for line in file:
                yield line.split()

    def size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def tool(self, call_id: str, name: str, seconds: float) -> list[str]:
        """The command of a tool: a process of its own, with an effect in `calls`."""
        return ["sh", "-c", _TOOL.format(log=self.folder / "calls", seconds=seconds), call_id, name]

    def call(self, call_id: str, name: str, seconds: float) -> int:
        """Runs a tool; returns its status."""
        done = subprocess.run(self.tool(call_id, name, seconds), stdout=subprocess.PIPE, check=False)
        return done.returncode if done.returncode or done.stdout == b"done\n" else 1

    async def acall(self, call_id: str, name: str, seconds: float) -> int:
        process = await asyncio.create_subprocess_exec(
            *self.tool(call_id, name, seconds), stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await process.communicate()
        except BaseException:  # timed out, or cut: what was stopped is not to wait for ever
            process.kill()
            raise
        return process.returncode if process.returncode or output == b"done\n" else 1

    def running_tools(self, newest: int = 1 << 30) -> list[tuple[str, int]]:
        """(call id, pid) of tools that still live, among those that began last."""
        found = []
        # A line has fewer than a hundred bytes.
        lines = list(self.read("calls", max(0, self.size("calls") - 100 * newest)))
        for words in lines[-newest:]:
            if len(words) == 3 and words[1] != "0" and self._is_ours(int(words[1])):
                found.append((words[0], int(words[1])))
        return found

    def _is_ours(self, pid: int) -> bool:
        """Whether the process is a tool of this run, and not one that got its number since."""
        try:
            return str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
