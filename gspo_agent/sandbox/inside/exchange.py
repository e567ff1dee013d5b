"""A program that is asked, frame by frame, until the trainer hangs up: one side of a test file and its solution."""

from __future__ import annotations

import signal

from . import frames
from .dialogue import Dialogue, Job
from .peers.solution import host_solution
from .peers.tests import run_tests
from .repl import waits_only

_SIDES = {"tests": run_tests, "solution": host_solution}


def serve_exchange(job: Job, side: str) -> None:
    """Each frame on the job's channel is a question; its answer comes with what was printed in the meantime."""
    dialogue = Dialogue(job, _SIDES[side], shared=False)
    questions, stopped = frames.Incoming(), False
    while True:
        _, blobs = frames.unpack(questions.wait(job.channel))
        if stopped:
            job.enclosure.signal(signal.SIGCONT)
        status, answer = dialogue.ask(blobs[0])
        printed = dialogue.streams.drain(job.limits["output_bytes"])
        stopped = dialogue.alive and not waits_only(job, dialogue.pid)
        if stopped:  # threads of a side that waits use no processor
            job.enclosure.signal(signal.SIGSTOP)
        spent = {"cpu_s": dialogue.cpu_s, "wall_s": dialogue.wall_s}
        job.channel.sendall(frames.pack({"status": status, **spent}, answer, *printed))
