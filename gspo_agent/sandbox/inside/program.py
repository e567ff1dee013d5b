"""The process in which untrusted code runs: how it loses every right, and how it behaves like a plain interpreter."""

from __future__ import annotations

import _signal
import _sitebuiltins
import atexit
import builtins
import contextlib
import gc
import io
import linecache
import math
import os
import resource
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from . import linux
from .contents import Compiled
from .walls import Enclosure

KEPT_FD = 3
_EVERY_FD = 1 << 30
COMPILE_ERROR, OUT_OF_MEMORY = 122, 121
EXIT_STATUS = {COMPILE_ERROR: "compile_error", OUT_OF_MEMORY: "memory_limit"}
MAIN_FILE = "main.py"
_RECURSION = 1000 + 22  # the frames of the harness below the first one of the code
_MAX_FRAMES = 12  # of a traceback, the innermost ones
_NOT_ITS_OWN = (os.path.dirname(__file__), "<frozen ")


def prepare() -> None:
    """In the fork server: what every program has alike is made once, and not by each of them."""
    for name, fd, mode, errors in (
        ("stdin", 0, "rb", "surrogateescape"),
        ("stdout", 1, "wb", "surrogateescape"),
        ("stderr", 2, "wb", "backslashreplace"),
    ):
        raw = open(fd, mode, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=fd == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [MAIN_FILE]
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")  # what -S left out
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")


def confine(
    limits: list[tuple[int, int]],
    enclosure: Enclosure,
    streams: tuple[int, int, int],
    kept: int | None,
    *,
    whole_run: bool,
    last_fd: int = _EVERY_FD,
    capabilities: linux.Capabilities = linux.NO_CAPABILITIES,
) -> None:
    """Leaves this process with three (four) descriptors, no privilege, and the limits; there is no way back.

    A rehearsal keeps the descriptors from `last_fd` on and its `capabilities`.
    """
    enclosure.enter()
    for target, source in enumerate(streams):
        os.dup2(source, target)
    if kept not in (None, KEPT_FD):
        os.dup2(kept, KEPT_FD, inheritable=False)
    os.closerange(KEPT_FD + (kept is not None), last_fd)
    os.umask(0o022)
    os.chdir(enclosure.work)
    enclosure.lose_identity()
    for kind, value in limits:
        resource.setrlimit(kind, (value, value))
    linux.set_capabilities(capabilities)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # a supervisor is not, and /dev/stdin needs it
    enclosure.lock()
    _become_plain_interpreter(enclosure.work, whole_run=whole_run)


def kernel_limits(limits: dict[str, Any], *, whole_run: bool, own_count: bool) -> list[tuple[int, int]]:
    """What `resource.setrlimit` sets, as far as this machine's own hard limits allow it."""
    chosen = {
        resource.RLIMIT_AS: limits["address_space_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["output_bytes"],
        resource.RLIMIT_STACK: limits["stack_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if own_count:
        chosen[resource.RLIMIT_NPROC] = limits["processes"]
    if whole_run:  # the kernel's own stop, should the supervisor be late
        chosen[resource.RLIMIT_CPU] = math.ceil(limits["cpu_s"]) + 2
    hard = {kind: resource.getrlimit(kind)[1] for kind in chosen}
    return [
        (kind, value if hard[kind] == resource.RLIM_INFINITY else min(value, hard[kind]))
        for kind, value in chosen.items()
    ]


def become_harness_again(work: str) -> None:
    """After a rehearsal of `confine`."""
    gc.disable()
    sys.path.remove(work)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # pid 1 is deaf to what it has no handler for
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_IGN)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


def _become_plain_interpreter(work: str, *, whole_run: bool) -> None:
    # Not `signal.signal`, which looks up enumerations.
    if whole_run:
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)  # a flood of output ends at once
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    sys.path.insert(0, work)
    sys.setrecursionlimit(_RECURSION)
    gc.enable()


def fresh_main(name: str = "__main__") -> types.ModuleType:
    """An empty `__main__` in the place of the harness's own."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def run(code: bytes | memoryview, compiled: Compiled | None = None) -> int:
    """The code as the file main.py, from its first statement to its exit handlers; the exit code."""
    status = execute(code, compiled)
    return COMPILE_ERROR if status is None else _finish(status)


def execute(code: bytes | memoryview, compiled: Compiled | None = None) -> int | None:
    """Without the exit handlers; None where it is not Python."""
    module = fresh_main()
    module.__file__ = MAIN_FILE
    body = compiled.load() if compiled else None
    if body is None:
        try:
            body = compile(code, MAIN_FILE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            show(error, code, MAIN_FILE)
            return None
        if compiled and compiled.file is not None:
            _save(body, compiled)
    return _outcome(lambda: exec(body, module.__dict__), code)


def _save(body: types.CodeType, compiled: Compiled) -> None:
    try:
        if os.fstat(2).st_size == 0:  # or each program has to print the compiler's warnings
            compiled.save(body, KEPT_FD)
    finally:
        os.close(KEPT_FD)


def complete(body: Callable[[], object]) -> int:
    """A program that is no main.py, to the end of its exit handlers; the exit code."""
    return _finish(_outcome(body))


def _outcome(body: Callable[[], object], code: bytes | memoryview = b"") -> int:
    try:
        body()
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:
        show(error, code, MAIN_FILE)
        return OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
    return 0


def _finish(status: int) -> int:
    if threading := sys.modules.get("threading"):
        _attempt(lambda: threading._shutdown())  # waits for threads, as the interpreter does at its end
    _attempt(lambda: atexit._run_exitfuncs())
    if not _attempt(lambda: sys.stdout.flush()):
        status = status or 120
    _attempt(lambda: sys.stderr.flush())
    return status


def _attempt(step: Callable[[], object]) -> bool:
    """Whether it came to its end."""
    try:
        step()
        return True
    except BaseException:
        return False


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def show(error: BaseException, code: bytes | memoryview, filename: str) -> None:
    """The traceback as Python prints it, without the frames of the harness, on standard error."""
    with contextlib.suppress(BaseException):
        sys.stderr.write(describe(error, code, filename))


def remember(code: bytes | memoryview, filename: str) -> None:
    """Lets tracebacks show the lines of code that is no file."""
    lines = bytes(code).decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[filename] = (len(code), None, lines, filename)


def describe(error: BaseException, code: bytes | memoryview = b"", filename: str = "") -> str:
    if code:
        remember(code, filename)
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    while part:
        part.stack[:] = [frame for frame in part.stack if not frame.filename.startswith(_NOT_ITS_OWN)][-_MAX_FRAMES:]
        for frame in part.stack:
            frame.colno = None  # no lines of carets: they cost a model tokens and say little
        part = part.__cause__ or part.__context__
    return "".join(report.format())
