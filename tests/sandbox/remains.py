"""What one run could leave to the next on the same supervisor, looked for by hostile programs: nothing.

What a user id leaves behind without a process of it: keyrings, message queues and shared memory (the filter refuses to
make them), semaphores (gone with the job's ipc namespace; refused where there is none), files and their attributes
(gone with the disk), descriptors in flight between sockets of nobody (the kernel collects them), and counts against
limits of processes, pipes, watches and locks (they end with the processes, which are waited for).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from gspo_agent.sandbox import RunResult, Sandbox, SandboxLimits

_TRIES = 20  # on a busy machine: a run that is looked after is the last one of its supervisor
_WINDOW = 12  # bytes of a marker; nobody meets them by chance
_ROOM = SandboxLimits(output_bytes=1 << 29)

# Standard error ends with the program's supervisor: its namespace, in which it is 1, and its process id.
_WHO = """
import os, sys
who = f"{os.readlink('/proc/self/ns/pid')} {os.getppid()}"
"""
_SAY_WHO = "\nsys.stderr.write(who)\n"
NAMED = _WHO + _SAY_WHO

_LEAVE = """
import ctypes, threading
'MARKER'  # and a comment: MARKER
text = sys.stdin.read()
libc = ctypes.CDLL(None)
libc.prctl(15, text[:15].encode(), 0, 0, 0)
os.environ[text[:32]] = sys.intern(text)
sys.argv.append(text)
thread = threading.Thread(target=print, args=(text,), name=text[:32]); thread.start(); thread.join()
for place in (".", os.environ["TMPDIR"]):
    os.mkdir(f"{place}/{text[:32]}"); open(f"{place}/{text[:32]}/{text[:32]}", "w").write(text)
try:
    if os.fork() == 0:
        print(text, file=sys.stderr, flush=True); os.setsid(); os._exit(0)
    os.wait()
except PermissionError:  # where a supervisor would have to look at files, it ends with the run
    for place in (".", os.environ["TMPDIR"]):
        os.remove(f"{place}/{text[:32]}/{text[:32]}"); os.rmdir(f"{place}/{text[:32]}")
print(text, file=sys.stderr)
"""
_PROGRAMS = {  # that have a marker in all they have, and what becomes of them
    _WHO + _LEAVE + _SAY_WHO: "ok",
    _WHO + _LEAVE + "print(text * 50_000)" + _SAY_WHO: "ok",
    _WHO + _LEAVE + "raise ValueError(text)": "runtime_error",
    "def xMARKER(:": "compile_error",
}

# Every page that the program can read goes to standard output, straight from where it lies.
_DUMP = """
import ctypes
PAGE, STEP = 1 << 12, 1 << 20
libc = ctypes.CDLL(None)
libc.mincore.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
libc.write.argtypes, libc.write.restype = (ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t), ctypes.c_ssize_t
libc.sbrk.restype = ctypes.c_size_t
pages = ctypes.create_string_buffer(STEP // PAGE)

def mapped(start, end):
    if libc.mincore(start, end - start, ctypes.addressof(pages)) == 0:
        yield start, end
    elif end - start > PAGE:
        middle = start + (end - start) // 2 // PAGE * PAGE
        yield from mapped(start, middle)
        yield from mapped(middle, end)

def areas():
    try:
        for line in open("/proc/self/maps"):
            if line.split()[1][0] == "r" and "[v" not in line:
                yield tuple(int(edge, 16) for edge in line.split()[0].split("-"))
    except OSError:  # the kernel is asked for each page
        top = libc.sbrk(0) // STEP * STEP
        low = ctypes.cast(libc.write, ctypes.c_void_p).value // STEP * STEP
        for first, last in ((top - 32 * STEP, top + STEP), (low - 96 * STEP, low + 64 * STEP)):
            for start in range(first, last, STEP):
                yield from mapped(start, start + STEP)

for start, end in list(areas()):
    while start < end:
        start += max(libc.write(1, start, end - start), 0) or PAGE
"""


async def in_turn(
    sandbox: Sandbox,
    *programs: str,
    stdins: tuple[str, ...] = ("", "", ""),
    limits: tuple[SandboxLimits, ...] = (_ROOM, _ROOM, _ROOM),
    same: bool = True,
) -> list[RunResult]:
    """Runs of which the last one was, with `same`, on the supervisor of the first one; so were those in between."""
    for _ in range(_TRIES):
        results = [
            await sandbox.run(code, stdin=stdin, limits=limit)
            for code, stdin, limit in zip(programs, stdins, limits, strict=False)
        ]
        first, *_, last = ((result.stderr.splitlines() or [b""])[-1] for result in results)
        if first == last or not same:
            return results
    raise AssertionError(f"no supervisor served all of them: {results}")


async def check_memory(sandbox: Sandbox) -> None:
    """A fork of the supervisor searches all of its memory for what came with another run, and what that printed."""
    for program, status in _PROGRAMS.items():
        marker, own, unread = (os.urandom(16).hex() for _ in range(3))
        _, left, found = await in_turn(
            sandbox,
            NAMED,
            program.replace("MARKER", marker),
            f"{_WHO}{_DUMP}{_SAY_WHO}# {own}",
            stdins=("", marker * 2, unread),
        )
        assert left.status == status, left
        assert status == "compile_error" or marker in left.stderr.decode()
        dump = found.stdout
        # What is there is found: in the memory of requests, and on every heap.
        assert [text in dump for text in (own.encode(), unread.encode(), b"infra_error")] == [True] * 3
        assert [start for start in range(0, 32 - _WINDOW, 10) if marker[start : start + _WINDOW].encode() in dump] == []


async def check_system_v(sandbox: Sandbox) -> None:
    """A set of semaphores stays when its maker ends; here it can't be made, or it is gone."""
    key = int.from_bytes(os.urandom(3)) + 1
    code = f"{_WHO}import ctypes\nprint(ctypes.CDLL(None).semget({key}, %d, %d)){_SAY_WHO}"
    made, found = await in_turn(sandbox, code % (1, 0o1666), code % (0, 0))
    assert made.status == "ok"
    assert found.stdout == b"-1\n"


async def check_disk(sandbox: Sandbox) -> None:
    """The directories are empty, as they always were, and have room for what the limits of the run say."""
    look = """
for place in (".", os.environ["TMPDIR"]):
    facts = os.stat(place)
    print(os.listdir(place), oct(facts.st_mode), facts.st_nlink, os.listxattr(place))
for n in range(30): open(str(n), "wb").write(bytes(1 << 18))
print(len(os.listdir(".")))
for n in range(30): os.remove(str(n))
"""
    attributes = """
import contextlib
for place in (".", os.environ["TMPDIR"]):
    with contextlib.suppress(OSError): os.setxattr(place, "user.left", b"x")
    with contextlib.suppress(OSError): os.chmod(place, 0o777)
os.umask(0o777)
"""
    files = """
with contextlib.suppress(OSError): [open(str(n), "wb").write(bytes(1 << 18)) for n in range(99)]
with contextlib.suppress(OSError): os.makedirs("d/" * 9)
os.chdir(os.environ["TMPDIR"])
with contextlib.suppress(OSError): os.rename(os.environ["HOME"], "away")
"""
    tight, wide = SandboxLimits(disk_bytes=2 << 20, files=20), SandboxLimits(disk_bytes=32 << 20, files=40)
    look = _WHO + look + _SAY_WHO
    for left, same in ((attributes, True), (attributes + files, sandbox.backend == "ns")):
        programs = (look, _WHO + left + _SAY_WHO, look)
        before, _, after = await in_turn(sandbox, *programs, limits=(wide, tight, wide), same=same)
        assert before.stdout.endswith(b"30\n"), before
        assert after.stdout == before.stdout.replace(before.stderr, after.stderr)


async def check_processes(sandbox: Sandbox) -> None:
    """No process is left, none counts, and the next one's id does not tell how many there were."""
    leave = """
import threading, time
for _ in range(3): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(60)
            os._exit(0)
except PermissionError: pass
os.close(1); os.close(0)
sys.stderr.write(who); sys.stderr.flush(); os._exit(0)
"""
    look = """
import time
ids = []
try: ids += [sorted(filter(str.isdigit, os.listdir("/proc"))), os.getpid(), os.getsid(0), os.getpgid(0)]
except PermissionError: pass
try:
    for _ in range(8):
        ids.append(os.fork())
        if ids[-1] == 0: time.sleep(9); os._exit(0)
except PermissionError: pass
print(ids)
"""
    few = SandboxLimits(processes=9)
    look = _WHO + look + _SAY_WHO
    before, _, after = await in_turn(sandbox, look, _WHO + leave, look, limits=(few, few, few))
    assert before.status == "ok"
    assert after.stdout == before.stdout


async def check_surroundings(sandbox: Sandbox) -> None:
    """Limits, environment, signals and the interpreter are those of a first run."""
    leave = """
import atexit, builtins, gc, resource, signal
for number in range(1, 32):
    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
os.environ.clear(); os.umask(0o777); sys.argv[:] = ["left"]; builtins.left = 1; gc.disable()
sys.setrecursionlimit(99); sys.path.clear()
for kind in range(15):
    try: resource.setrlimit(kind, (1, 1)) if kind not in (0, 2, 3, 6, 7, 9) else None
    except (OSError, ValueError): pass
"""
    look = """
import builtins, gc, resource, signal
print(sorted(os.environ.items()), os.getcwd(), os.umask(0), sys.argv, sys.path, hasattr(builtins, "left"))
print([signal.getsignal(number) for number in range(1, 65)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print([resource.getrlimit(kind) for kind in range(15)], gc.isenabled(), sys.getrecursionlimit())
print(sorted(sys.modules), os.times()[2:4], sorted(globals()), sys.gettrace(), os.sched_getaffinity(0))
"""
    tight = SandboxLimits(
        cpu_s=1, address_space_bytes=1 << 30, processes=4, open_files=16, stack_bytes=1 << 20, output_bytes=1 << 16
    )
    look = _WHO + look + _SAY_WHO
    before, _, after = await in_turn(sandbox, look, _WHO + leave + _SAY_WHO, look, limits=(_ROOM, tight, _ROOM))
    assert before.status == "ok", before.stderr
    assert after.stdout == before.stdout


async def check_code(sandbox: Sandbox) -> None:
    """No run of a batch changes what the next one runs: not in files, and not in memory that they could share."""
    tamper = """
print("as it was", flush=True)
import ctypes, os
for number in range(3, 64):
    for place in (number, f"/proc/1/fd/{number}", f"/proc/{os.getppid()}/fd/{number}"):
        try:
            with open(place, "r+b", buffering=0) as file: print(place, file.write(bytes(4096)))
        except (OSError, ValueError): pass
sought, put = b"as it" + b" was", b"replaced!"
def replace(start, end):
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 3)
    found = ctypes.string_at(start, end - start)
    place = found.find(sought)
    while place >= 0:
        ctypes.memmove(start + place, put, len(put))
        place = found.find(sought, place + 1)
try: areas = [line.split() for line in open("/proc/self/maps")]
except OSError: areas = []  # where no process shows its own, only files are left to try
for span, rights, _, _, _, *name in areas:
    start, end = (int(edge, 16) for edge in span.split("-"))
    if rights[0] == "r" and end - start <= 1 << 16 and (not name or "(deleted)" in name):
        replace(start, end)
"""
    for code in (tamper, tamper + "assert (1, 'a warning of the compiler, which every run is to show')"):
        results = await sandbox.run_many(code, [""] * 4)
        assert [(result.stdout, result.status) for result in results] == [(b"as it was\n", "ok")] * 4, results


CHECKS: list[Callable[[Sandbox], Awaitable[None]]] = [
    check_memory,
    check_code,
    check_system_v,
    check_disk,
    check_processes,
    check_surroundings,
]
