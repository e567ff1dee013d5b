"""What only computer algebra can tell is asked of processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.errors import ConfigError
from rewards.math_answer import Options, Verdict, Workers, need_math_verify, symbolic, verify, worker
from rewards.math_answer.processes import Worker
from tests.rewards.math_answer.test_verdict import CASES, text_of
from tests.sandbox.survivors import gone

ROOT = Path(__file__).parents[3]
ENDLESS = r"\boxed{\int_0^{x} \sin(t^{3})e^{t^{2}} \ln(t+7) dt}", r"\int_0^{x} \sin(t^{3})e^{t^{2}} \ln(t+8) dt"
SUM = r"\boxed{\sum_{k=1}^{n} k}", r"\frac{n(n+1)}{2}"
OTHER_SUM = SUM[0], r"\frac{n(n-1)}{2}"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(size=1, cpu_s=30, wall_s=60) as workers:
        yield workers
    assert not workers._busy


def busy_one(workers: Workers) -> Worker:
    for _ in range(2000):
        time.sleep(0.01)
        if busy := [worker for worker in list(workers._busy) if worker.jobs and worker.kind == "sympy"]:
            return busy[0]
    raise AssertionError("no worker was asked")


def server_pid(workers: Workers) -> int:
    assert workers._server
    return workers._server._process.pid


def until_left(workers: Workers, worker: Worker) -> None:
    while worker in workers._busy or not gone(worker.pid or 0):
        time.sleep(0.001)


def test_nothing_is_started_before_something_is_undecided() -> None:
    with Workers() as idle:
        assert idle.judge(r"\boxed{7}", "7").path == "text"
        assert idle.judge(r"\boxed{7}", "8").reason == "different:num"
        assert not any(idle._idle.values())


async def test_a_sum_is_worked_out_in_any_thread_and_on_any_event_loop(workers: Workers) -> None:
    assert verify(*SUM).reason == "undecided"
    right = workers.judge(*SUM)
    assert (right.correct, right.path) == (True, "sympy"), right
    assert not workers.judge(*OTHER_SUM).correct
    assert (await workers.verify(*SUM)).correct
    with ThreadPoolExecutor(3) as pool:
        here = pool.map(workers.judge, *zip(SUM, OTHER_SUM, SUM, strict=True))
        there = pool.submit(lambda: asyncio.run(workers.verify(*SUM)))
        assert [verdict.correct for verdict in here] == [True, False, True]
        assert there.result().correct
    assert workers.killed == 0


async def test_beside_an_event_loop_nothing_is_judged_in_this_process(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads take turns with the loop; and one that holds the turn may itself wait for a processor."""
    monkeypatch.setattr("rewards.math_answer.workers.judge_text", None)
    texts = (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"), (r"\boxed{7}", "8"), ("\ud800" + "{" * 1_000_000, "7"), SUM
    verdicts = await asyncio.gather(*(workers.verify(*pair) for pair in texts))
    assert [verdict.reason for verdict in verdicts] == [
        "equal:num", "different:num", "no_answer:no_box", "equal:num",
    ]  # fmt: skip
    assert verdicts[0].extracted == r"\sqrt{12}"


async def test_a_server_that_was_killed_is_followed_by_another(workers: Workers) -> None:
    await workers.verify(r"\boxed{7}", "7")
    os.kill(server_pid(workers), signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, server_pid(workers), os.WEXITED | os.WNOWAIT)
    workers._idle["parser"].popleft().end()
    assert (await workers.verify(r"\boxed{7}", "7")).correct
    assert (await workers.verify(*SUM)).correct


async def test_what_is_endless_costs_its_limit_and_nobody_else_anything(workers: Workers) -> None:
    workers.judge(*SUM)
    killed = workers.killed
    workers.cpu_s = 0.5
    endless, ticks = await asyncio.gather(workers.verify(*ENDLESS), ticks_until(0.5))
    assert (endless.correct, endless.reason) == (False, "timeout"), endless
    assert endless.scored
    assert ticks > 5  # of 50: the event loop went on, and did not stand still until the worker was killed
    workers.cpu_s = 30
    assert workers.killed == killed + 1
    assert (await workers.verify(*SUM)).correct


async def ticks_until(seconds: float) -> int:
    """How often the event loop came around, of once in 10 ms."""
    ticks, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(0.01)
        ticks += 1
    return ticks


def test_a_worker_that_gets_no_time_says_nothing_about_the_answer(workers: Workers) -> None:
    """As on a machine that is too busy: here the workers are stopped."""
    workers.judge(*SUM)
    for stopped in workers._idle["sympy"]:
        stopped.get_ready(60)
        os.kill(stopped.pid, signal.SIGSTOP)
    workers.wall_s = 0.2
    verdict = workers.judge(*ENDLESS)
    workers.wall_s = 60
    assert (verdict.reason, verdict.scored) == ("starved", False)


@pytest.mark.slow
async def test_a_stopped_worker_that_takes_in_no_text_costs_no_verdict(workers: Workers) -> None:
    await workers.verify(r"\boxed{7}", "7")
    for stopped in workers._idle["parser"]:
        assert stopped.pid
        os.kill(stopped.pid, signal.SIGSTOP)
    workers.wall_s = 3
    assert (await workers.verify("." * 10_000_000 + r"\boxed{7}", "7")).correct
    workers.wall_s = 60


@pytest.mark.slow
def test_workers_that_died_while_idle_cost_no_verdict() -> None:
    with Workers(size=1, cpu_s=30, wall_s=60) as workers:
        assert workers.judge(*SUM).correct
        (idle,) = workers._idle["sympy"]
        idle.kill()
        while not idle.ended:
            time.sleep(0.001)
        assert workers.judge(*SUM).correct
        assert workers.killed == 1


def test_a_worker_that_dies_again_and_again_leaves_the_sample_unscored(workers: Workers) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(workers.judge, *ENDLESS)
        for _ in range(2):
            worker = busy_one(workers)
            worker.kill()
            until_left(workers, worker)
        verdict = job.result()
    assert verdict.reason == "worker_died"
    assert not verdict.scored
    assert workers.judge(*SUM).correct


async def test_cancelling_kills_the_worker_and_the_next_one_answers(workers: Workers) -> None:
    killed = workers.killed
    job = asyncio.create_task(workers.verify(*ENDLESS))
    worker = await asyncio.to_thread(busy_one, workers)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await asyncio.to_thread(until_left, workers, worker)
    assert workers.killed == killed + 1
    assert (await workers.verify(*SUM)).correct


ORPHAN = r"""
import json, sys, threading, time
from rewards.math_answer import Workers

workers = Workers(size=2, cpu_s=600)
for pair in json.loads(sys.argv[1]):
    threading.Thread(target=workers.judge, args=pair).start()
while sum(worker.jobs for worker in list(workers._busy)) < 2:
    time.sleep(0.01)
print([workers._server._process.pid, *(worker.pid for worker in workers._busy)], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_worker_outlives_a_process_that_is_killed() -> None:
    command = [sys.executable, "-c", ORPHAN, json.dumps([ENDLESS, ENDLESS])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        process.kill()
    end = time.monotonic() + 60
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 3
    assert all(map(gone, pids))


@pytest.mark.slow
def test_a_worker_is_replaced_after_so_many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.math_answer.workers._JOBS", 2)
    with Workers(size=1, cpu_s=30, wall_s=60) as workers:
        pids = []
        for _ in range(4):
            assert workers.judge(*SUM).correct
            pids += [worker.pid for worker in workers._idle["sympy"]]
        assert workers.killed == 0
    assert len(set(pids)) == 2  # of four jobs: after each first of two it is there, after the second it is not
    assert all(map(gone, pids))


@pytest.mark.slow
def test_a_closed_pool_leaves_no_process_and_lets_nobody_wait() -> None:
    workers = Workers(size=1, cpu_s=60, wall_s=60)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(workers.judge, *ENDLESS) for _ in range(2)]
        pids = [busy_one(workers).pid, server_pid(workers)]
        workers.close()
        for job in jobs:
            with pytest.raises(RuntimeError, match="closed"):
                job.result(timeout=10)
    assert all(map(gone, pids))


@pytest.mark.slow
def test_what_a_worker_inherits_is_its_channel_and_nothing_else(workers: Workers, tmp_path: Path) -> None:
    workers.judge(*SUM)
    with (tmp_path / "kept").open("w") as kept:
        os.set_inheritable(kept.fileno(), True)
        fresh = Workers(size=1)
        with fresh:
            fresh.judge(*SUM)
            (worker,) = fresh._idle["sympy"]
            process = Path(f"/proc/{worker.pid}")
            files = {os.readlink(file) for file in (process / "fd").iterdir()}
            assert {file.partition(":")[0] for file in files} == {"socket", "/dev/null"}
            environment = (process / "environ").read_bytes().split(b"\0")
            assert {name.partition(b"=")[0] for name in environment if name} <= {
                b"PYTHONPATH", b"PYTHONHASHSEED", b"SYMPY_GROUND_TYPES", b"MPMATH_NOGMPY", b"LC_CTYPE",
            }  # fmt: skip
            limits = (process / "limits").read_text()
            assert f"{1 << 30}" in limits
            assert os.getpgid(worker.pid) != os.getpgid(0)


def in_a_fork(workers: Workers, answers: Any) -> None:
    answers.put([workers.judge(*SUM).correct, workers.judge(*OTHER_SUM).correct, workers.killed])
    workers.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_workers_of_its_own(workers: Workers) -> None:
    """Two processes on one pipe would hear each other's verdicts."""
    workers.judge(*SUM)
    held = threading.Event()

    def hold() -> None:
        with workers._lock:
            held.set()
            time.sleep(1)

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=in_a_fork, args=(workers, answers))
    child.start()
    assert answers.get(timeout=60) == [True, False, workers.killed]
    child.join()
    holding.join()
    assert child.exitcode == 0
    assert workers.judge(*SUM).correct


LARGE = r"""
import json, sys, threading
import numpy
from rewards.math_answer import Workers

ballast = numpy.ones(1 << 27)  # 1 GB resident
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(100)]
for thread in threads:
    thread.start()
right, wrong = json.loads(sys.argv[1])
with Workers(size=2, cpu_s=30, wall_s=60) as workers:
    print(json.dumps([workers.judge(*right).correct, workers.judge(*wrong).correct, workers.killed]))
stop.set()
"""


@pytest.mark.slow
def test_a_process_with_a_gigabyte_and_a_hundred_threads_starts_workers(tmp_path: Path) -> None:
    assert printed([sys.executable, "-c", LARGE, json.dumps([SUM, OTHER_SUM])], tmp_path) == [[True, False, 0]]


RANK = r"""
import asyncio, json, sys
import torch.distributed as dist
import torch
from rewards.math_answer import Workers

dist.init_process_group("gloo")
right, wrong = json.loads(sys.argv[1])


async def main():
    with Workers(size=1, cpu_s=30, wall_s=60) as workers:
        verdicts = await asyncio.gather(*(workers.verify(*pair) for pair in (right, wrong, right)))
        total = torch.tensor([float(verdict.correct) for verdict in verdicts])
        await asyncio.to_thread(dist.all_reduce, total)
        return [total.tolist(), workers.killed]


answer = asyncio.run(main())
if dist.get_rank() == 0:
    print(json.dumps(answer))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_torchrun_have_workers_of_their_own(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert printed([*torchrun, str(rank), json.dumps([SUM, OTHER_SUM])], tmp_path) == [[[2.0, 0.0, 2.0], 0]]


def printed(command: list[str], directory: Path) -> list[Any]:
    """What it prints; `directory` is for its temporary files, which torchrun leaves behind."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


SECOND = Options(second_opinion=True)


def test_a_second_opinion_that_is_not_installed_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    need_math_verify.cache_clear()
    with Workers() as workers, pytest.raises(ConfigError, match=r"pip install 'gspo_agent\[math-verify\]'"):
        workers.judge(*SUM, SECOND)


def test_a_second_opinion_is_asked_about_what_is_undecided_and_nothing_else() -> None:
    def said(answer: str, gold: str, opinion: Any = lambda answer, gold: True) -> list[Any]:
        verdict = worker.judged(rf"\boxed{{{answer}}}", gold, SECOND, symbolic.SymbolicComparison, opinion)
        return [verdict.correct, verdict.reason, verdict.path]

    def refuses(answer: str, gold: str) -> bool:
        raise RecursionError

    assert said("f(2)", "x") == [True, "equal:second_opinion", "math-verify"]
    assert said("f(2)", "x", refuses) == [False, "undecided", "none"]
    assert said("f(2)", "x", None) == [False, "undecided", "none"]
    assert said(r"\sum_{k=1}^{n} k", OTHER_SUM[1]) == [False, "different:num", "sympy"]
    assert said("(1,2)", "(2,1)")[:2] == [False, "different:tuple"]
    assert said("9^{9999}", "3")[:2] == [False, "rejected:too_large"]


@pytest.fixture(scope="module")
def second() -> Iterator[Workers]:
    pytest.importorskip("math_verify")
    with Workers(cpu_s=2, wall_s=60) as workers:
        yield workers


def confirmed(workers: Workers, answer: str, gold: str) -> Verdict:
    return workers.judge(rf"\boxed{{{answer}}}", gold, SECOND)


def test_a_second_opinion_may_confirm_and_overrule_nothing(second: Workers) -> None:
    limit = r"\lim_{x\to 0}\frac{\sin x}{x}"
    assert verify(rf"\boxed{{{limit}}}", "1").reason == "undecided"
    assert second.judge(rf"\boxed{{{limit}}}", "1").reason == "undecided"  # off unless it is asked for
    verdict = confirmed(second, limit, "1")
    assert (verdict.correct, verdict.reason, verdict.path) == (True, "equal:second_opinion", "math-verify")
    assert confirmed(second, limit, "2").reason == "undecided"
    assert confirmed(second, "36", r"36\text{ m}").correct == verify(r"\boxed{36}", r"36\text{ m}").correct
    for answer, gold in (("72 = 73", "73"), ("3.1415927", r"\pi"), ("2104_6", "2104_5"), ("1/3^{60}", "1/3^{61}")):
        assert confirmed(second, answer, gold).reason == verify(rf"\boxed{{{answer}}}", gold).reason  # it says yes


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("7 3", "73"), ("3!!", "720"), ("x'", "x"), ("10^12", "10^{12}"), ("1/2x", r"\frac{1}{2x}"), ("58?", "58")],
)
def test_what_has_two_readings_is_not_asked_about(second: Workers, answer: str, gold: str) -> None:
    assert confirmed(second, answer, gold).reason == "undecided"


@pytest.mark.slow
def test_a_second_opinion_accepts_nothing_wrong_of_the_corpus(second: Workers) -> None:
    for case in CASES:
        if not case["expected"]:
            verdict = second.judge(text_of(case), case["gold"], Options(**case.get("opts", {}), second_opinion=True))
            assert not verdict.correct, (case["id"], verdict)
