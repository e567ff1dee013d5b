"""Sessions: a program that keeps its variables from one cell to the next."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import sys
import types
from typing import Any

from . import frames, program
from .dialogue import Dialogue, Job, Questions
from .lull import Lull

_OK, _ERROR, _FLOODED = b"o", b"e", b"f"
_EXPRESSION = re.compile(rb"[^=:;\\\n]+\n*")  # or it begins with a keyword, as `import` does
_STATUS = {_OK: "ok", _FLOODED: "output_limit"}  # claims of the code about itself; anything else is an error


def serve_session(job: Job) -> None:
    """The supervisor's side: each frame on the job's channel is a cell; answers with what it cost (`frames.SPENT`), its
    status and its output.

    What only the next cell needs is done after the answer, while the trainer reads it.
    """
    most = job.limits["output_bytes"]
    dialogue = Dialogue(job, answer_cells)
    dialogue.watch.interruptible = True
    lull = Lull(job, dialogue)
    job.channel.sendall(frames.pack({"status": "ok"}))
    while True:
        cell = lull.end()
        if not dialogue.alive:
            job.channel.sendall(frames.pack({}, frames.SPENT.pack(False, 0.0, 0.0), b"dead", b""))
            continue
        status = _run_cell(dialogue, cell)
        spent = frames.SPENT.pack(dialogue.alive, dialogue.cpu_s, dialogue.wall_s)
        job.channel.sendall(frames.pack({}, spent, status.encode(), dialogue.streams.take(most)))
        lull.begin()
        dialogue.streams.rewind(most)
        dialogue.ready()


def _run_cell(dialogue: Dialogue, code: bytes) -> str:
    status, answer = dialogue.ask(code)
    if status == "ok":
        return _STATUS.get(answer, "runtime_error")
    if status == "time_limit" and dialogue.alive:
        dialogue.interrupt()
    elif status in ("runtime_error", "killed"):
        return "dead"
    return status


def answer_cells(questions: Questions) -> None:
    """The program's side."""
    repl = _Repl()
    signal.signal(signal.SIGINT, repl.interrupted)
    while (code := questions.next()) is not None:
        questions.answer(repl.run(code))


class _Repl:
    def __init__(self) -> None:
        self.variables = program.fresh_main().__dict__
        self.count = 0
        self.running = False

    def interrupted(self, number: int, frame: types.FrameType | None) -> None:
        if self.running:  # between two cells there is nothing to stop
            self.running = False
            raise KeyboardInterrupt

    def run(self, code: bytes) -> bytes:
        self.count += 1
        filename = f"<cell {self.count}>"
        program.remember(code, filename)
        status = _OK
        try:
            body, last = _compile(code, filename)
            self.running = True
            if body:
                exec(body, self.variables)
            if last:
                self.display(eval(last, self.variables))
            self.running = False
        except BaseException as error:
            self.running = False
            status = _ERROR if _flush() else _FLOODED
            program.show(error, code, filename)
        return status if _flush() else _FLOODED

    def display(self, value: Any) -> None:
        if value is not None:
            self.variables["_"] = value
            print(repr(value))


def _flush() -> bool:
    """False when the output was full; then half of it makes room for what the streams still hold."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        return True
    except BaseException:
        with contextlib.suppress(BaseException):
            os.ftruncate(1, os.fstat(1).st_size // 2)
            sys.stdout.flush()
            sys.stderr.flush()
        return False


def _compile(code: bytes, filename: str) -> tuple[types.CodeType | None, types.CodeType | None]:
    """The statements, and the last one by itself where it is an expression, whose value is shown."""
    if _EXPRESSION.fullmatch(code):  # then most of the time is that of the tree
        with contextlib.suppress(SyntaxError):
            return None, compile(code, filename, "eval", dont_inherit=True)
    # Not ast.parse: its own frame would stand in the traceback that the model reads.
    tree = compile(code, filename, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    body = compile(tree, filename, "exec", dont_inherit=True) if tree.body else None
    if not isinstance(last, ast.Expr):
        return body, None
    return body, compile(ast.Expression(last.value), filename, "eval", dont_inherit=True)
