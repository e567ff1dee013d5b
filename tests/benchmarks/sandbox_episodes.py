"""Many episodes of the code sandbox at once: no wrong verdict, and what they cost.

    python -m tests.benchmarks.sandbox_episodes [--episodes 300]

Each keeps an interpreter of its own open to its end, and hands in a program, after running the visible tests of it and
of another one. The policy is a script; collector, journal, environment and sandbox are those of a run. A third of the
programs are right, some of them slow, sleepy or loud; the others are wrong, crash, kill themselves, loop, sleep, flood,
fork or eat memory. Exit status 1 where any verdict, tool result or interpreter is not as it has to be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from envs.code_sandbox import CodeSandbox
from gspo_agent.config import EnvConfig, Limits, RolloutConfig
from gspo_agent.env import EnvFactory, tool
from gspo_agent.messages import call
from gspo_agent.rollout.collector import Collector, Source
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.sandbox import Session, shared_sandbox
from gspo_agent.testing import ByteChat, ScriptedEngine
from gspo_agent.trajectory import Group
from tests.sandbox import survivors

CHAT = ByteChat()
GROUP = 2
CPU_S = 1.0
AT_ONCE = 2 * len(os.sched_getaffinity(0))
"""Jobs."""
READ = "n = int(input())\n"
RIGHT = {
    "right": READ + "print(n + {n})",
    "right, slow": READ + "import time\nwhile time.process_time() < 0.3: pass\nprint(n + {n})",
    "right, sleepy": READ + "import time; time.sleep(0.5); print(n + {n})",
    "right, loud": READ + "import sys; sys.stderr.write('x' * 1_000_000); print(' ' * 1_000_000, n + {n})",
    "right, with a child": READ + "import os\npid = os.fork()\nif pid: os.wait()\nelse: print(n + {n})",
}
WRONG = {
    "wrong": READ + "print(n - 1)",
    "raises": READ + "print(n + {n}); raise ValueError",
    "leaves": "import os; os._exit(0)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "kills itself": READ + "import os; print(n + {n}, flush=True); os.kill(os.getpid(), 9)",
    "loops": READ + "print(n + {n}, flush=True)\nwhile True: pass",
    "sleeps": READ + "print(n + {n}, flush=True)\nimport time; time.sleep(60)",
    "floods": READ + "print(n + {n})\nwhile True: print('y' * 1000)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "eats": "a = []\nwhile True: a.append(bytearray(b'x' * 10_000_000))",
}
PROGRAMS = RIGHT | WRONG
_TICK_S = 0.1


class Agent(CodeSandbox):
    """With an interpreter beside the program."""

    gate: ClassVar[asyncio.Barrier]
    """Where everyone waits until all have theirs, and then until they were looked at."""

    open: ClassVar[int] = 0
    session: Session | None = None

    @tool
    async def run(self, code: str) -> str:
        """Run code in the interpreter."""
        if self.session is None:
            self.session = await shared_sandbox().session()
            Agent.open += 1
            await self.gate.wait()
            await self.gate.wait()
        return (await self.session.cell(code)).output

    async def close(self) -> None:  # type: ignore[override]
        if self.session is not None:
            Agent.open -= 1
            await self.session.close()


class Tasks:
    """One program after the other, each with a number of its own."""

    num_tasks = None

    def task(self, cursor: int) -> dict[str, Any]:
        names = list(PROGRAMS)
        test = [{"stdin": f"{n}\n", "stdout": f"{n + cursor}\n"} for n in (3, 70)]
        return {
            "prompt": f"{cursor}:{names[cursor % len(names)]}",
            "kind": "stdio",
            "public_tests": test[:1],
            "hidden_tests": test,
            "time_limit": CPU_S,
        }


def script(number: int, name: str) -> list[list[int]]:
    """What the policy says, turn by turn."""
    return [
        CHAT.turn("", call("run", code=f"x = {number}")),
        CHAT.turn("", call("write", code=PROGRAMS["wrong"])),
        CHAT.turn("", call("test")),
        CHAT.turn("", call("run", code="x += 1; x")),
        CHAT.turn("", call("write", code=PROGRAMS[name].format(n=number))),
        CHAT.turn("", call("test")),
        CHAT.turn("", call("run", code="x")),
        CHAT.turn("Done."),
    ]


def policy(prompt: Sequence[int], seed: int) -> list[int]:
    text = list(prompt)
    begin = text.index(ByteChat.USER) + 1
    number, _, name = bytes(text[begin : text.index(ByteChat.END, begin)]).decode().partition(":")
    return script(int(number), name)[text.count(ByteChat.ASSISTANT) - 1]


def mistakes(group: Group) -> Iterator[str]:
    """What is not as it has to be in the episodes of one task."""
    number, _, name = group.task["prompt"].partition(":")
    for trajectory in group.trajectories:
        said = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        ran = ["", "written", None, f"{int(number) + 1}\n", "written", None, f"{int(number) + 1}\n"]
        tests = [said[place] for place, expected in enumerate(ran) if expected is None and place < len(said)]
        wrong = [message for message, expected in zip(said, ran, strict=False) if expected not in (None, message)]
        right = float(name in RIGHT)
        if trajectory.reward != right or trajectory.attempt:
            yield f"{trajectory.id} ({name}): reward {trajectory.reward}, attempt {trajectory.attempt}"
        if len(said) != len(ran) or wrong or [test == "passed" for test in tests] != [False, name in RIGHT]:
            yield f"{trajectory.id} ({name}): {said}"


@dataclass
class Outcome:
    """Of all episodes together; memory in MiB."""

    wrong: list[str] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    processes: int = 0
    """The most at once below the fork server."""
    jobs: int = 0
    """The most at once, those just ending included."""
    session_memory: float = 0.0
    """Of each idle interpreter, both its processes, with what is shared divided among those that share it."""
    session_cpu: float = 0.0
    """Share of a processor that all of them take together while they are idle."""
    trainer_memory: tuple[float, float] = (0.0, 0.0)
    """Before and at the most."""
    left: set[int] = field(default_factory=set)
    """Processes that outlive the sandbox."""


async def play(episodes: int, directory: Path) -> Outcome:
    """Waits for all."""
    outcome, started = Outcome(), time.perf_counter()
    before = _resident()
    launcher = shared_sandbox().server().pid
    Agent.gate = asyncio.Barrier(episodes + 1)
    await asyncio.sleep(0.1)  # until the sandbox's own probe has ended
    bare = _proportional(survivors.descendants(launcher))
    with Journal.open(directory / "journal.sqlite", durability="process") as journal, _watched(launcher, outcome):
        collector = Collector(
            journal=journal,
            ledger=Ledger(journal),
            sources=[
                Source(EnvFactory(EnvConfig(id="agent"), Agent), Tasks(), Limits(context_tokens=60_000, wall=60.0))
            ],
            chat=CHAT,  # type: ignore[arg-type]
            engine=ScriptedEngine(policy),
            config=RolloutConfig(
                group_size=GROUP,
                groups_per_step=episodes // GROUP,
                over_provision=1.0,
                filter_zero_variance=False,
                max_attempts=1,
                max_failed=1.0,
            ),
            seed=0,
        )
        await collector.start(0)
        await Agent.gate.wait()
        tree = survivors.descendants(launcher)
        outcome.session_memory = (_proportional(tree) - bare) / episodes
        outcome.session_cpu = await _idle_share(tree)
        await Agent.gate.wait()
        lease = await collector.lease(episodes // GROUP, step=1)
        await collector.stop()
    outcome.wall_s = time.perf_counter() - started
    outcome.trainer_memory = before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for group in lease.groups:
        outcome.wrong += mistakes(group)
        outcome.verdicts[group.task["prompt"].partition(":")[2]] += len(group.trajectories)
    tree = survivors.descendants(launcher)
    await shared_sandbox().close()
    outcome.left = survivors.alive(tree)
    return outcome


@contextmanager
def _watched(launcher: int, outcome: Outcome) -> Iterator[None]:
    """Looks now and then how many processes there are, and how many jobs."""
    over = threading.Event()

    server = survivors.server_of(shared_sandbox().server())

    def look() -> None:
        while not over.wait(_TICK_S):
            outcome.processes = max(outcome.processes, len(survivors.descendants(launcher)))
            outcome.jobs = max(outcome.jobs, len(survivors.children().get(server, ())) - Agent.open)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


async def _idle_share(pids: set[int], seconds: float = 1.0) -> float:
    before = _cpu(pids)
    await asyncio.sleep(seconds)
    return (_cpu(pids) - before) / seconds


def _cpu(pids: set[int]) -> float:
    used = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _proportional(pids: set[int]) -> float:
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main(episodes: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(play(episodes, Path(directory)))
    played = outcome.verdicts.total()
    print(f"{played} episodes in {outcome.wall_s:.0f} s: {dict(outcome.verdicts)}")
    print(f"{len(outcome.wrong)} mistakes, {episodes - played} episodes failed, {len(outcome.left)} processes left")
    print(
        f"{episodes} idle interpreters: {outcome.session_memory:.2f} MiB each (PSS), {outcome.session_cpu:.0%} of a CPU"
    )
    print(f"at most {outcome.jobs} jobs at once, {outcome.processes} processes")
    print("trainer: {:.0f} MiB before, at most {:.0f}".format(*outcome.trainer_memory))
    for mistake in outcome.wrong:
        print(f"  {mistake}")
    return int(bool(outcome.wrong or outcome.left or played != episodes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=300)
    sys.exit(main(parser.parse_args().episodes))
