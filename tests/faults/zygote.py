"""Zygote: a process that has everything imported and forks victims, so that a life costs milliseconds.

It has one thread and has used nothing of what it imported, so a fork of it is as good as a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent.parent
_PR_SET_PDEATHSIG = 1


class Life:
    """One forked process, from outside. It leads a session of its own, in which all that it starts can be found."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid, self.status = pid, None
        self._zygote = zygote
        self.handle = os.pidfd_open(pid)
        """Readable once the process has ended."""
        self.status: int | None

    @property
    def over(self) -> bool:
        return self.status is not None or bool(select.select([self.handle], [], [], 0)[0])

    def send(self, number: int) -> None:
        """A signal; none where the process has ended, so that a number used again is never hit."""
        if self.status is None:
            signal.pidfd_send_signal(self.handle, number)

    def wait(self, seconds: float) -> int | None:
        """The exit status (negative: the signal that ended it); None where it still lives after `seconds`."""
        if self.status is None and select.select([self.handle], [], [], seconds)[0]:
            self.status = int(self._zygote.ask({"wait": self.pid})["status"])
            os.close(self.handle)
        return self.status

    def kill(self) -> int:
        self.send(signal.SIGKILL)
        status = self.wait(30)
        if status is None:
            raise RuntimeError(f"process {self.pid} outlived its kill -9")
        return status

    def session(self) -> list[int]:
        """What still lives of its session: the processes that it started and that did not leave."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                if int(fields[3]) == self.pid and fields[0] not in "ZX":
                    found.append(int(entry.name))
        return found


class Zygote:
    """Forks `function` as often as it is asked to; ends, with all that lives, with this object's process.

    >>> with Zygote(["tests.faults.victim"]) as zygote:
    ...     life = zygote.fork("tests.faults.victim:main", {"folder": "/dev/shm/x"}, log=Path("/dev/shm/x.log"))
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", *modules],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def fork(self, function: str, arguments: dict[str, Any], log: Path) -> Life:
        """Starts "module:function" with `arguments` (JSON) as its one parameter; it prints into `log`."""
        return Life(self, int(self.ask({"function": function, "arguments": arguments, "log": str(log)})["pid"]))

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the zygote has died")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    while line := questions.readline():
        question = json.loads(line)
        if "wait" in question:
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])}
        else:
            pid = os.fork()
            if not pid:
                questions.close()
                answers.close()
                _live(question)
            answer = {"pid": pid}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _live(question: dict[str, Any]) -> None:
    status = 70
    try:
        _die_with_parent()
        os.setsid()
        _redirect(question["log"])
        module, _, name = question["function"].partition(":")
        print(f"--- life {os.getpid()} at {time.monotonic():.3f}: {question['arguments']}", flush=True)
        status = int(getattr(sys.modules[module], name)(question["arguments"]) or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _redirect(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(number, target)
    os.close(nothing)
    os.close(out)


if __name__ == "__main__":
    _serve()
