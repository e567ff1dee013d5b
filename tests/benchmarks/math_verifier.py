"""The math verifier beside math-verify 0.9.0 in one run: verifications a CPU second, CPU time of each, wrong verdicts.

`python -m tests.benchmarks.math_verifier`, where math-verify 0.9.0 (with an antlr4 runtime) is installed; without it,
ours alone. Each set is judged by both, one text after another in this process, warm. CPU time, because a busy
machine makes wall time a matter of its scheduler.

Then how long an event loop stands still while texts are verified beside it, 64 at a time: the whole corpus, those of
every kind, hostile ones, and what no computer algebra ends with. Beside it stands what another process that only
sleeps sees at the same time: so long it is this machine that makes anyone wait.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rewards.math_answer import Workers, verify
from tests.rewards.math_answer.test_verdict import CASES, text_of

Row = tuple[str, str, bool]
"""(text, gold, whether it is right)."""
Judge = Callable[[str, str], bool]
_ORDINARY = {
    "integer": 50, "fraction": 15, "radical": 8, "settuple": 6, "interval": 5, "units": 5, "polynomial": 5,
    "percent": 3, "text": 3,
}  # fmt: skip
"""In a hundred answers of a data set like MATH, about as many are of each kind of the corpus."""
_HOSTILE = 0.05
_AT_ONCE = 64
_IDLE = [sys.executable, "-c", "import asyncio; from tests.benchmarks.math_verifier import idle; asyncio.run(idle())"]
_ENDLESS = r"\boxed{{\int_0^x \sin(t^3)e^{{t^2}} \ln(t+{}) dt}}"


def ours(text: str, gold: str) -> bool:
    return verify(text, gold).correct


def math_verify() -> Judge | None:
    try:
        import math_verify as other
    except ImportError:
        return None
    target = [other.LatexExtractionConfig(), other.ExprExtractionConfig()]

    def judge(text: str, gold: str) -> bool:
        wanted = other.parse(f"${gold}$", extraction_config=target)
        return bool(other.verify(wanted, other.parse(text, extraction_config=target)))

    return judge


def sets(num: int) -> dict[str, list[Row]]:
    rng = random.Random(0)
    rows: dict[str, list[Row]] = {}
    for case in CASES:
        if not case.get("opts"):
            kind = "hostile" if case.get("hostile") else case["tag"]
            rows.setdefault(kind, []).append((text_of(case), case["gold"], case["expected"]))
    tags = rng.choices(list(_ORDINARY), list(_ORDINARY.values()), k=num)
    ordinary = [rng.choice(rows[tag]) for tag in tags]
    mixed = [rng.choice(rows["hostile"]) if rng.random() < _HOSTILE else row for row in ordinary]
    whole = [row for kind in rows if kind != "hostile" for row in rows[kind]]
    return {
        "AIME integers": [_aime(rng) for _ in range(num)],
        "ordinary responses": ordinary,
        "5 % hostile": mixed,
        "every kind alike": [rng.choice(whole) for _ in range(num)],
        "hostile": rows["hostile"],
    }


def _aime(rng: random.Random) -> Row:
    gold, right = rng.randrange(1000), rng.random() < 0.5
    given = gold if right else rng.randrange(1000)
    prose = "Let us count the ways in which the two sequences meet. " * rng.randrange(5, 40)
    return f"{prose}So the answer is $\\boxed{{{given:03}}}$.", str(gold), given == gold


def measured(judge: Judge, rows: list[Row]) -> dict[str, Any]:
    times, wrong, accepted = [], 0, 0
    for text, gold, right in rows:
        began = time.thread_time()
        try:
            said = judge(text, gold)
        except Exception:
            said = False
        times.append(time.thread_time() - began)
        wrong += said != right
        accepted += said and not right
    times.sort()
    return {
        "per_second": len(times) / sum(times),
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(0.99 * len(times))],
        "max_ms": 1000 * times[-1],
        "wrong": wrong,
        "wrong_accepted": accepted,
    }


async def watch(lags: list[float]) -> None:
    """Notes by how many milliseconds each of the loop's pauses of 5 ms was longer."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.005)
        lags.append(1000 * (time.perf_counter() - began) - 5)


async def loop_lag(rows: list[Row]) -> list[float]:
    """While all of them are verified."""
    lags: list[float] = []
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(row: Row) -> None:
        async with places:
            await workers.verify(row[0], row[1])

    with Workers() as workers:
        watching = asyncio.create_task(watch(lags))
        await asyncio.gather(*map(one, rows))
        watching.cancel()
    return lags


async def idle() -> None:
    """Sleeps until standard input ends, and then prints the longest lag."""
    lags: list[float] = []
    watching = asyncio.create_task(watch(lags))
    print(flush=True)
    await asyncio.to_thread(sys.stdin.read)
    watching.cancel()
    print(max(lags))


def loop_lags(rows: list[Row], passes: int) -> str:
    """The longest of each pass, and the idle watcher's."""
    said = []
    for _ in range(passes):
        with subprocess.Popen(_IDLE, stdin=-1, stdout=-1, text=True) as watcher:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            lag = max(asyncio.run(loop_lag(rows)))
            said.append(f"{lag:.0f} ({float(watcher.communicate()[0]):.0f})")
    return " ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=400, help="texts of each set")
    parser.add_argument("--passes", type=int, default=3, help="times that each set is verified beside a loop")
    num, passes = vars(parser.parse_args()).values()
    logging.disable(logging.WARNING)  # of math-verify, which writes down what it gave up
    other = math_verify()
    for name, rows in sets(num).items():
        measured(ours, rows[:50])
        results = {"ours": measured(ours, rows)}
        if other is not None and name != "hostile":  # which would take it five seconds each
            measured(other, rows[:20])
            results["math-verify"] = measured(other, rows)
        for who, result in results.items():
            print(f"{name:20} {who:12}", *(f"{key} {value:10.3f}" for key, value in result.items()))
        if len(results) > 1:
            ratio = results["ours"]["per_second"] / results["math-verify"]["per_second"]
            print(f"{name:20} ratio {ratio:.1f}", flush=True)
    endless = [(_ENDLESS.format(n), _ENDLESS.format(n + 1), False) for n in range(4)]
    corpus = [(text_of(case), case["gold"], case["expected"]) for case in CASES]
    for name, rows in {"corpus": corpus, **sets(num), "endless": endless}.items():
        print(f"{name:20} longest loop lag of each pass (of an idle loop) {loop_lags(rows, passes)} ms", flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
