"""What runs in the processes of the workers: a server that forks one whenever it is asked to, and the work they do.

Forked from a server that has loaded everything, a worker starts within milliseconds. Started by `processes`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial

from rewards.math_answer.comparison import Comparison
from rewards.math_answer.normal import normal_form
from rewards.math_answer.verdict import Options, Verdict, judge_text, read_gold

MEMORY_BYTES = 1 << 30
Judge = Callable[[str, str, Options], Verdict]
"""(text, gold, options) -> verdict."""
SecondOpinion = Callable[[str, str], bool]
"""Of two normal forms: whether they are the same."""
_REHEARSED = (
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"),
    (r"\boxed{\sum_{k=1}^{n} k}", r"\frac{n(n+1)}{2}"),
    (r"\boxed{\lim_{x\to 0}\frac{\sin x}{x}}", "1"),
)
"""What these load, no worker has to."""


def main() -> None:
    """Consumes requests: the name of a kind of worker, and the channel for one. Ends, and all workers with it, when
    nobody is left to send any."""
    for limit, bound in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (bound, bound))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker: who asked for it has a handle of it
    control = socket.socket(fileno=0)
    while True:
        kind, channels, _, _ = socket.recv_fds(control, 64, 1)
        if not kind:
            os.killpg(0, signal.SIGKILL)
        with socket.socket(fileno=channels[0]) as channel:
            judge = judge_of(kind.decode())
            with contextlib.suppress(OSError):  # there is no process to be had, as the closed channel says
                if os.fork() == 0:
                    control.close()
                    _work(channel, judge)


@cache
def judge_of(kind: str) -> Judge:
    """How a worker of this kind judges; what that takes is loaded here."""
    compare: type[Comparison] = Comparison
    opinion: SecondOpinion | None = None
    if kind != "parser":
        from rewards.math_answer.symbolic import SymbolicComparison as compare
    if kind == "math-verify":
        from rewards.math_answer.second_opinion import confirms as opinion
    judge = partial(judged, compare=compare, opinion=opinion)
    for text, gold in _REHEARSED:
        judge(text, gold, Options())
    gc.freeze()
    return judge


def judged(
    text: str,
    gold: str,
    options: Options,
    compare: type[Comparison] = Comparison,
    opinion: SecondOpinion | None = None,
) -> Verdict:
    """The verdict; what `compare` leaves undecided may be confirmed by a second opinion."""
    verdict, answer = judge_text(text, gold, options, compare)
    if opinion and answer is not None and verdict.reason == "undecided":
        with contextlib.suppress(Exception):  # whatever math-verify raises where it can't go on
            if opinion(normal_form(answer), read_gold(gold).normal):
                return replace(verdict, correct=True, reason="equal:second_opinion", path="math-verify")
    return verdict


def _work(channel: socket.socket, judge: Judge) -> None:
    """Says who it is, with a handle of its process, and answers each line of JSON with one. Never returns."""
    try:
        handle = os.pidfd_open(os.getpid())
        socket.send_fds(channel, [b"%d\n" % os.getpid()], [handle])
        os.close(handle)
        for line in channel.makefile("rb"):
            job = json.loads(line)
            # A worker whose server was killed in the middle of a job ends by this.
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + job["cpu_s"]) + 2, -1))
            verdict = judge(job["text"], job["gold"], Options(*job["options"]))
            said = {"verdict": asdict(verdict), "used": time.process_time()}
            channel.sendall(json.dumps(said).encode() + b"\n")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
