"""A program that is asked, frame by frame, until the trainer hangs up: one side of a test file and its solution."""

from __future__ import annotations

from . import frames
from .dialogue import Dialogue, Job
from .lull import Lull
from .peers.solution import host_solution
from .peers.tests import run_tests

_SIDES = {"tests": run_tests, "solution": host_solution}


def serve_exchange(job: Job, side: str) -> None:
    """Each frame on the job's channel is a question; its answer comes with what was printed in the meantime."""
    dialogue = Dialogue(job, _SIDES[side], shared=False)
    lull = Lull(job, dialogue)
    while True:
        status, answer = dialogue.ask(lull.end())
        printed = dialogue.streams.drain(job.limits["output_bytes"])
        lull.begin()
        spent = {"cpu_s": dialogue.cpu_s, "wall_s": dialogue.wall_s}
        job.channel.sendall(frames.pack({"status": status, **spent}, answer, *printed))
