"""Victim: one life of a run, made to be broken. It is the real `train_async` behind the real signal handling; what is
exchanged is what a campaign has to know beforehand (the policy) or has to see from outside (learner and engine)."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo_agent import trainer
from gspo_agent.config import Config
from gspo_agent.errors import GspoAgentError
from gspo_agent.interruption import Interruption
from gspo_agent.learner import checkpoint
from gspo_agent.learner.learner import Learner
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout.collector import Collector
from gspo_agent.run import Run
from tests.faults import learner as lineage
from tests.faults.engines import Local, Scripted
from tests.faults.learner import Lineage
from tests.faults.outside import Outside
from tests.faults.points import PLACES, Points
from tests.faults.sabotage import SABOTAGES, open_door
from tests.faults.world import CHAT, WORLDS, DiceChat, World

LOST_STATUS = 1
_CLONE_NEWUTS = 0x04000000


class Wire:
    """Datagrams to and from the campaign."""

    def __init__(self, folder: Path, points: Points) -> None:
        self._points = points
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own = folder / f"victim-{os.getpid()}.sock"
        own.unlink(missing_ok=True)
        self._socket.bind(str(own))
        self._socket.setblocking(False)
        self._campaign = str(folder / "campaign.sock")

    def say(self, event: str, **what: Any) -> None:
        with suppress(OSError):  # nobody listens, or more is said than is read
            self._socket.sendto(json.dumps({"event": event, "pid": os.getpid(), **what}).encode(), self._campaign)

    def obey(self, engine: Any) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read, engine)

    def _read(self, engine: Any) -> None:
        order = json.loads(self._socket.recv(1 << 16))
        if order["do"] == "aim":
            self._points.aim(order["point"], order["times"])
            self.say("obeyed", number=1)
            return
        asyncio.ensure_future(_do(order.pop("do"), engine, self, **order))  # noqa: RUF006


async def _do(what: str, engine: Any, wire: Wire, **how: Any) -> None:
    if what == "abort":
        chosen = engine.live[: how["number"]]
        await asyncio.gather(*map(engine.abort, chosen))
        wire.say("obeyed", number=len(chosen))
        return
    number = len(engine.live)
    if what == "restart":
        await engine.restart(how["seconds"])
    elif what == "break":
        await engine.break_down()
    elif what == "publish":
        await engine.publish_again()
    elif what == "clock":
        Clock.shift += how["seconds"]
    wire.say("obeyed", number=number)


class Clock:
    """`time.time` of this process, which a fault may shift; `time.monotonic` stays what it is."""

    shift = 0.0
    _real = staticmethod(time.time)

    @classmethod
    def time(cls) -> float:
        return cls._real() + cls.shift


class Quiet(Screen):
    """Tells the campaign as well."""

    def __init__(self, config: Config, wire: Wire) -> None:
        super().__init__(config)
        self._wire = wire

    def step(self, step: int, metrics: Any) -> None:
        self._wire.say("step", step=step)
        super().step(step, metrics)

    def time_to_draw(self) -> bool:
        return False


def main(arguments: dict[str, Any]) -> int:
    """Lives until the run is done (0), it is cut (130), something breaks (1), or it dies."""
    folder = Path(arguments["folder"])
    config = Config.parse(arguments["config"])
    World.outside = outside = Outside(folder / "outside")
    World.tool_seconds = arguments.get("tool_seconds", World.tool_seconds)
    Clock.shift = arguments.get("clock", 0.0)
    time.time = Clock.time
    if arguments.get("host"):
        rename_host(arguments["host"])
    if arguments.get("lockless"):  # as where file locks do not reach another host
        open_door()
    points = Points(tuple(arguments["die_at"]) if arguments.get("die_at") else None)
    wire = Wire(folder, points)
    install(arguments, outside, wire, points)
    try:
        interruption = Interruption(config.run.grace)
        interruption.run(life(config, wire, interruption))
    except GspoAgentError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        wire.say("error", error=type(error).__name__)
        return LOST_STATUS
    wire.say("done")
    return 0


def rename_host(name: str) -> None:
    """Gives this process a machine of another name: a namespace of its own, or without the right to one, a pretence."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(name)
    else:
        socket.gethostname = lambda: name


async def life(config: Config, wire: Wire, interruption: Interruption) -> None:
    screen = Quiet(config, wire)
    await trainer.train_async(config, WORLDS[config.env[0].id], screen=screen, interruption=interruption)


def install(arguments: dict[str, Any], outside: Outside, wire: Wire, points: Points) -> None:
    """Puts the campaign's parts in place of the trainer's."""
    patch: Any = trainer
    engine: list[Any] = []
    if arguments["engine"] == "scripted":
        Lineage.seconds = arguments.get("learn_seconds", 0.01)
        patch.load_chat = lambda path: CHAT
        saving: Any = lineage
        learner: type[Any] = Lineage
        chunk, delay = arguments["chunk"], arguments["delay"]
        patch.Learner = lambda *args, **kwargs: Lineage(outside)
        patch.make_engine = lambda config, model, urls: _kept(engine, Scripted(outside, chunk=chunk, delay=delay))
    else:
        patch.load_chat = lambda path: DiceChat()
        saving, learner = checkpoint, _watched_learner(outside)
        patch.Learner = learner
        patch.make_engine = lambda config, model, urls: _kept(engine, Local(outside, model))
    patch.LearnerProcess = patch.Learner  # a process of its own would take seconds to start
    _remember_groups(outside)
    Run.draw = lambda self: None  # type: ignore[method-assign]
    _announce(wire, engine)
    for name, (owner, attribute) in PLACES.items():
        points.watch(owner, attribute, name)
    points.watch(learner, "step", "learn")
    points.watch(saving, "write" if saving is lineage else "_write", "written")
    points.watch(saving, "save", "save")
    points.watch(checkpoint, "prune", "prune")
    if arguments.get("sabotage"):
        SABOTAGES[arguments["sabotage"]][0]()


def _kept(place: list[Any], engine: Any) -> Any:
    place[:] = [engine]
    return engine


def _remember_groups(outside: Outside) -> None:
    """The learner is told which groups its next batch is made of."""
    make: Any = trainer.make_batch

    def make_batch(groups: Any, **how: Any) -> Any:
        Lineage.groups = [group.id for group in groups]
        return make(groups, **how)

    trainer.make_batch = make_batch


def _watched_learner(outside: Outside) -> type[Learner]:
    class Watched(Learner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            outside.write("learner", "begun", 0)

        def step(self, batch: Any) -> dict[str, float]:
            outside.write("learner", "trained", batch.step, ",".join(map(str, Lineage.groups)))
            return super().step(batch)

    restore: Any = checkpoint.restore

    def restored(*args: Any, **kwargs: Any) -> int:
        step = int(restore(*args, **kwargs))
        outside.write("learner", "begun", step)
        return step

    checkpoint.restore = restored
    return Watched


def _announce(wire: Wire, engine: list[Any]) -> None:
    start: Any = Collector.start

    async def started(self: Collector, step: int) -> None:
        await start(self, step)
        wire.obey(engine[0])
        wire.say("started", life=self._journal.life, step=step, threads=threading.active_count())

    Collector.start = started  # type: ignore[method-assign]
