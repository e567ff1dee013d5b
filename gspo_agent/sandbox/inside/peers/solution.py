"""The side of the solution: what runs in its program. Nothing here is secret, and nothing that it says is believed."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import sys
from typing import Any

from .. import command, program, tree
from ..dialogue import Questions
from .peer import Lost, Peer


def host_solution(questions: Questions) -> None:
    """The first question is the files of the solution; its answer is empty. Then the tests ask."""
    opening = questions.next()
    if opening is None:
        return
    files = tree.unpack(opening)
    tree.write(files, ".")
    questions.answer(b"")
    with contextlib.suppress(Lost):
        _Host(questions, files).serve()


class _Stdin(io.TextIOBase):
    """The standard input that the tests have set for the time of a call."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def read(self, size: int | None = -1) -> str:
        return str(self.peer.ask("read", -1 if size is None else size))

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return str(self.peer.ask("readline"))


class _Host(Peer):
    def __init__(self, questions: Questions, files: tree.Changes) -> None:
        super().__init__(self._answer, self._question)
        self.questions = questions
        self.top = {path.removeprefix("src/").partition("/")[0].removesuffix(".py") for path in files}
        self.here = os.getcwd()
        self.loaded: set[str] = set()
        program.fresh_main()
        command.find_sources()
        builtins.input = lambda prompt="": self.ask("input", str(prompt))
        sys.stdin = _Stdin(self)

    def _answer(self, message: bytes) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        self.questions.answer(message)

    def _question(self) -> bytes:
        question = self.questions.next()
        if question is None:
            raise Lost
        return question

    def perform(self, operation: str, *arguments: Any) -> Any:
        return self.load(*arguments) if operation == "load" else super().perform(operation, *arguments)

    def load(self, name: str) -> Any:
        """Runs the module, also when it is imported for a second time, and also where another one has its name; None
        where there is no such module."""
        known = getattr(sys.modules.get(name), "__file__", None)
        if name in self.loaded or (name in self.top and not str(known).startswith(self.here)):
            sys.modules.pop(name, None)
        self.loaded.add(name)
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            return None
        return sys.modules[name]

    def trace(self, error: BaseException) -> str:
        try:
            return program.describe(error).replace(f'"{self.here}/', '"')[-4000:]
        except Exception:
            return ""
