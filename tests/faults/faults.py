"""Faults: what is done to a run, each a function of the subject and of its own draw."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.points import PLACES
from tests.faults.subject import PATIENCE, Loss, Subject
from tests.faults.world import WORLDS

DIED, WENT_ON, MISSED = "died, continued", "went on", "nothing to hit"
_CUT = 130
_SECONDS_TO_FIND = 1.5

Act = Callable[[Subject, random.Random], str]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    seed: int
    """Of everything that is drawn for it."""

    def happen(self, subject: Subject) -> str:
        """Does it; returns one of the outcomes. Raises Loss where the subject does not take it as promised."""
        return KINDS[self.kind](subject, random.Random(self.seed))


def draw(rng: random.Random, engine: str, world: str, only: str | None = None) -> Fault:
    """Faults that a run has nothing for are not drawn for it."""
    names = [name for name in KINDS if _fits(name, engine, world) and (only or "") in name]
    return Fault(rng.choices(names, [_weight(name) for name in names])[0], rng.randrange(1 << 30))


def _weight(name: str) -> float:
    """How often a kind is drawn; few runs have a sandbox."""
    return 3.0 if name.startswith("kill -9 of the trainer") else 5.0 if "sandbox" in name else 1.0


def world_for(only: str | None) -> str | None:
    """The world that a run must have for such faults; None: any has something for them."""
    names = [name for name in KINDS if (only or "") in name]
    fitting = [world for world in WORLDS if any(_fits(name, "scripted", world) for name in names)]
    return None if len(fitting) == len(WORLDS) else fitting[0]


def _fits(name: str, engine: str, world: str) -> bool:
    if "sandbox" in name:
        return world == "bench"
    if "tool" in name:
        return world in ("till", "clerk", "forgetful")
    return not (name == "engine restart" and engine == "local")


def kill_at_random(subject: Subject, rng: random.Random) -> str:
    """From the first moment of a process on."""
    if subject.life is None:
        subject.begin()
    time.sleep(rng.choice((rng.uniform(0, 0.1), rng.uniform(0, 0.6))))
    subject.kill()
    return DIED


def kill_at_point(subject: Subject, rng: random.Random) -> str:
    """Between two steps of the protocol."""
    names = [*PLACES, "learn", "written", "save", "prune"]
    name = rng.choice(names) + rng.choice((".before", ".after"))
    times = rng.choice((1, 1, 2, 3))
    if subject.life is None:
        subject.begin(die_at=(name, times))
    else:
        subject.alive()
        subject.order("aim", point=name, times=times)
    assert subject.life is not None
    if subject.life.wait(2.0) is None:  # a moment that does not come in this run
        subject.kill()
    else:
        subject.bury()
    return DIED


def terminate(number: int) -> Act:
    def act(subject: Subject, rng: random.Random) -> str:
        """A scheduler's preemption, sometimes with less grace than promised; or Ctrl-C."""
        life = subject.alive()
        time.sleep(rng.uniform(0, 0.3))
        life.send(number)
        if number == signal.SIGTERM and rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.1))
            life.kill()
        elif (status := life.wait(10)) != _CUT:
            raise Loss(f"signal {number}: status {status} instead of {_CUT}: {subject.last_words()}")
        subject.bury()
        return DIED

    return act


def kill_tool(subject: Subject, rng: random.Random) -> str:
    found = _running_tool(subject, rng)
    if found is None:
        return MISSED
    subject.excuses.add(r"the tool's process ended with")
    with suppress(ProcessLookupError):
        os.kill(found[1], signal.SIGKILL)
    return WENT_ON


def stop_tool(subject: Subject, rng: random.Random) -> str:
    """SIGSTOP; it goes on after a while, or it never does and the tool's deadline passes."""
    found = _running_tool(subject, rng)
    if found is None:
        return MISSED
    subject.hits.add(found[0])
    with suppress(ProcessLookupError):
        os.kill(found[1], signal.SIGSTOP)
        time.sleep(rng.uniform(0, 0.2))
        if rng.random() < 0.5:
            os.kill(found[1], signal.SIGCONT)
    return WENT_ON


def kill_sandbox(subject: Subject, rng: random.Random) -> str:
    life = subject.alive()
    until = time.monotonic() + _SECONDS_TO_FIND
    while time.monotonic() < until:
        family = _descendants(life.pid)
        if family:
            subject.excuses |= {"SandboxError", "NotIsolated: .* (it was killed meanwhile|the first job was lost)"}
            with suppress(ProcessLookupError):
                os.kill(rng.choice(family), signal.SIGKILL)
            return WENT_ON
        time.sleep(0.01)
    return MISSED


def engine_abort(subject: Subject, rng: random.Random) -> str:
    return _ordered(subject, rng, "abort", number=rng.randint(1, 8))


def engine_restart(subject: Subject, rng: random.Random) -> str:
    return _ordered(subject, rng, "restart", seconds=rng.choice((0.0, 0.05)))


def engine_failure(subject: Subject, rng: random.Random) -> str:
    subject.excuses |= {"scripted failure", "injected"}
    return _ordered(subject, rng, "break")


def weight_update(subject: Subject, rng: random.Random) -> str:
    return _ordered(subject, rng, "publish")


def clock_jump(subject: Subject, rng: random.Random) -> str:
    """Hours forward or back; half the time the next lives have the new clock too."""
    seconds = rng.choice((-1, 1)) * rng.uniform(60, 86400)
    if rng.random() < 0.5:
        subject.clock += seconds
    return _ordered(subject, rng, "clock", seconds=seconds)


def full_disk(subject: Subject, rng: random.Random) -> str:
    """The run ends with an error that names the journal or the checkpoint; once there is room, it goes on."""
    life = subject.alive()
    time.sleep(rng.uniform(0, 0.2))
    subject.disk.fill(life.pid, rng.choice((0, 4096, 40_000)))
    status = life.wait(PATIENCE)
    words = subject.last_words()
    if status is None:
        raise Loss(f"the run neither goes on nor ends on a full disk: {words}")
    subject.disk.relieve()
    if status != 1 or "JournalError" not in words:
        raise Loss(f"a full disk ended the run with status {status}: {words}")
    subject.bury()
    return DIED


def torn_page(subject: Subject, rng: random.Random) -> str:
    """A kill, and behind the last commit of the journal a frame that was half written."""
    subject.alive()
    time.sleep(rng.uniform(0, 0.3))
    subject.kill()
    wal = Path(f"{subject.journal}-wal")
    if not wal.exists():
        return DIED
    content = wal.read_bytes()
    end = last_commit(content)
    if end < len(content) and rng.random() < 0.5:
        cut = rng.randint(end, len(content) - 1)
        os.truncate(wal, cut)
    else:
        header = content[32 : 32 + 24] if rng.random() < 0.5 else b""
        with wal.open("r+b") as file:
            file.seek(end)
            file.write(header + rng.randbytes(rng.randint(1, 4096)))
    return DIED


def damaged_checkpoint(subject: Subject, rng: random.Random) -> str:
    """A kill, and the newest of two checkpoints is lost or has another byte."""
    subject.alive()
    until = time.monotonic() + 2 * _SECONDS_TO_FIND
    while len(subject.whole_checkpoints()) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.2))
    subject.kill()
    whole = subject.whole_checkpoints()
    if len(whole) < 2:
        return MISSED
    newest = whole[-1]
    if rng.random() < 0.5:
        shutil.rmtree(newest)
    else:
        file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1
        file.write_bytes(content)
    return DIED


def other_host(subject: Subject, rng: random.Random) -> str:
    """A kill; then the directory lies elsewhere and belongs to another machine, once the dead one's lease is over."""
    subject.alive()
    time.sleep(rng.uniform(0, 0.3))
    subject.kill()
    subject.move()
    subject.host = f"host-{rng.randrange(1000)}"
    subject.expire()
    return DIED


def second_process(subject: Subject, rng: random.Random) -> str:
    """The same command a second time, while the first goes on: refused, and the first one is not disturbed."""
    subject.alive()
    intruder = subject.fork(1)
    status = intruder.wait(20)
    if status != 1 or "RunLocked" not in subject.last_words():
        if status is None:
            intruder.kill()
        raise Loss(f"a second process in the run directory ended with {status}: {subject.last_words()}")
    return WENT_ON


KINDS: dict[str, Act] = {
    "kill -9 of the trainer, any moment": kill_at_random,
    "kill -9 of the trainer, at a step of the protocol": kill_at_point,
    "SIGTERM, sometimes kill -9 after it": terminate(signal.SIGTERM),
    "Ctrl-C": terminate(signal.SIGINT),
    "kill -9 of a tool": kill_tool,
    "SIGSTOP of a tool": stop_tool,
    "kill -9 in the sandbox": kill_sandbox,
    "engine abort": engine_abort,
    "engine restart": engine_restart,
    "engine failure": engine_failure,
    "weight update in flight": weight_update,
    "full disk": full_disk,
    "clock jump": clock_jump,
    "torn last page of the journal": torn_page,
    "newest checkpoint damaged": damaged_checkpoint,
    "kill -9, another host and directory": other_host,
    "second process": second_process,
}


def last_commit(wal: bytes) -> int:
    """Where the last committed frame of a write-ahead log ends, by its salts and commit marks."""
    if len(wal) < 32:
        return len(wal)
    page, salts = struct.unpack(">I", wal[8:12])[0], wal[16:24]
    end, place = 32, 32
    while place + 24 + page <= len(wal) and wal[place + 8 : place + 16] == salts:
        if struct.unpack(">I", wal[place + 4 : place + 8])[0]:
            end = place + 24 + page
        place += 24 + page
    return end


def _ordered(subject: Subject, rng: random.Random, what: str, **how: float) -> str:
    """Has the engine do it while requests run, if any are found running."""
    subject.alive()
    time.sleep(rng.uniform(0, 0.15))
    until = time.monotonic() + _SECONDS_TO_FIND
    while not subject.order(what, **how) and what != "clock":
        if time.monotonic() > until:
            return MISSED
        time.sleep(0.005)
    return WENT_ON


def _running_tool(subject: Subject, rng: random.Random) -> tuple[str, int] | None:
    subject.alive()
    until = time.monotonic() + _SECONDS_TO_FIND
    while time.monotonic() < until:
        running = subject.outside.running_tools(newest=40)
        if running:
            return rng.choice(running)
        time.sleep(0.001)
    return None


def _descendants(pid: int) -> list[int]:
    """The processes of the sandbox that `pid` started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    roots = [child for child in children.get(pid, []) if b"forkserver" in _command(child)]
    found = list(roots)
    for one in found:
        found += children.get(one, [])
    return found


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
