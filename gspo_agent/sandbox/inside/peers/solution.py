"""The side of the solution: what runs in its program. Nothing here is secret, and nothing that it says is believed."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import sys
import types
from typing import Any

from .. import program
from ..dialogue import Questions
from .peer import Lost, Peer


def host_solution(questions: Questions) -> None:
    """The first question is the module's name and the code; its answer is empty. Then the tests ask."""
    opening = questions.next()
    if opening is None:
        return
    head, _, code = opening.partition(b"\n")
    questions.answer(b"")
    with contextlib.suppress(Lost):
        _Host(questions, json.loads(head)["module"], code).serve()


class _Stdin(io.TextIOBase):
    """The standard input that the tests have set for the time of a call."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def read(self, size: int | None = -1) -> str:
        return str(self.peer.ask("read", -1 if size is None else size))

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return str(self.peer.ask("readline"))


class _Host(Peer):
    def __init__(self, questions: Questions, name: str, code: bytes) -> None:
        super().__init__(self._answer, self._question)
        self.questions, self.name, self.code = questions, name, code
        self.file = f"{name}.py"
        program.fresh_main()
        builtins.input = lambda prompt="": self.ask("input", str(prompt))
        sys.stdin = _Stdin(self)
        with open(self.file, "wb") as file:
            file.write(code)

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
        return self.load() if operation == "load" else super().perform(operation, *arguments)

    def load(self) -> types.ModuleType:
        """Runs the module, also when it is imported for a second time."""
        module = types.ModuleType(self.name)
        module.__file__ = self.file
        sys.modules[self.name] = module
        compiled = compile(self.code, self.file, "exec", dont_inherit=True)
        exec(compiled, module.__dict__)
        return sys.modules[self.name]

    def trace(self, error: BaseException) -> str:
        try:
            return program.describe(error, self.code, self.file)[-4000:]
        except Exception:
            return ""
