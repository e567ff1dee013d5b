"""A command in a workspace: the files come in, Python or a shell runs among them, and what has changed goes out."""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any, Protocol

from . import frames, program, tree
from .dialogue import Job as Watched
from .streams import Streams
from .walls import SHELL


class Job(Watched, Protocol):
    def outcome(self, verdict: str, cpu_s: float, exit_code: int | None, streams: Streams) -> dict[str, Any]: ...


def serve_command(job: Job, request: dict[str, Any], blobs: list[bytes]) -> None:
    """blobs: the tree, and the command as JSON, a list of Python's arguments or the text of a shell command.

    One frame is sent: what came of it, what it printed, and the changes of the tree.
    """
    packed, command = blobs
    limits, before = job.limits, tree.changed({}, tree.unpack(packed))
    if tree.places(before) > limits["files"] or tree.pages(before) > limits["disk_bytes"]:
        most = f"{limits['disk_bytes']} bytes or {limits['files']} files and directories"
        raise ValueError(f"the workspace is larger than {most}")
    _settle(job, packed)
    streams = Streams(shared=True)
    watch = job.start(streams, lambda: _run(json.loads(command)))
    verdict = watch.wait()
    cpu_s = watch.close()  # nothing of the job is running any more
    header = job.outcome(verdict, cpu_s, watch.exit_code, streams)
    try:
        after, left_out = tree.read(job.enclosure.work, limits["disk_bytes"], limits["files"])
    except OSError as error:  # without an id of its own, a program may move it away
        after, left_out = {}, [f"'.': {os.strerror(error.errno or 0)}"]
    output, found = streams.read(limits["output_bytes"])[0], tree.pack(tree.changes(before, after))
    job.channel.sendall(frames.pack({**header, "left_out": left_out}, output, found))
    streams.close()


def _settle(job: Job, packed: bytes) -> None:
    """In a program of its own: one that is stopped in the middle would seem to have removed the rest."""
    streams = Streams(shared=True)
    watch = job.start(streams, lambda: _write(packed))
    watch.wait()
    watch.close()
    streams.close()
    if watch.exit_code != 0:
        raise ValueError("the workspace could not be written")


def _write(packed: bytes) -> int:
    tree.write(tree.unpack(packed), ".")
    return 0


def _run(command: list[str] | str) -> int:
    find_sources()
    if isinstance(command, list):
        return _python(command)
    os.environ["PATH"] = f"{os.environ['PATH']}:{os.path.dirname(sys.executable)}"
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.execv(SHELL, [SHELL, "--norc", "--noprofile", "-c", command])


def find_sources() -> None:
    """Modules of the repository in the working directory can be imported, from its top and from its `src`."""
    here = os.getcwd()
    sys.path[:1] = [here, *([f"{here}/src"] if os.path.isdir("src") else [])]
    sys.dont_write_bytecode = True


def _python(arguments: list[str]) -> int:
    """As `python ARGUMENTS` would: a file, `-m module` or `-c code`, and what it finds in sys.argv."""
    kind, *rest = arguments
    if kind == "-c" and rest:
        sys.argv = ["-c", *rest[1:]]
        return program.run(rest[0].encode("utf-8", "surrogatepass"))
    program.fresh_main()
    if kind == "-m" and rest:
        sys.argv = rest
        return program.complete(lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True))
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
    return program.complete(lambda: runpy.run_path(kind, run_name="__main__"))
