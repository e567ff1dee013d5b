"""The process of a worker: one line of JSON with a job, one line with what came of it. Started by `workers`."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 1 << 30
SecondOpinion = Callable[[str, str], bool]


def main() -> None:
    for kind, bound in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (bound, bound))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    from rewards.math_answer import symbolic  # slow to load: while nobody waits

    confirmed: SecondOpinion | None = None
    if sys.argv[1:] == ["second_opinion"]:
        from rewards.math_answer.second_opinion import confirms

        confirmed = confirms
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # A worker whose parent was killed in the middle of a job ends by this.
        bound = int(used.ru_utime + used.ru_stime + job.pop("cpu_s")) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (bound, -1))
        answers.write(json.dumps(_done(symbolic, confirmed, **job)) + "\n")
        answers.flush()


def _done(symbolic: Any, confirmed: SecondOpinion | None, answer: str, gold: str, options: dict[str, Any]) -> list[Any]:
    """(correct, reason, path) of two normal forms."""
    from rewards.math_answer.outcomes import Rejected

    try:
        verdict = _judged(symbolic, answer, gold, options)
        if verdict[1] == "undecided" and confirmed is not None and confirmed(answer, gold):
            return [True, "equal:second_opinion", "math-verify"]
        return verdict
    except Rejected as problem:
        return [False, f"rejected:{problem}", "caps"]
    except MemoryError:
        return [False, "rejected:memory", "sympy"]
    except Exception:  # whatever math-verify raises where it can't go on
        return [False, "undecided", "math-verify"]


def _judged(symbolic: Any, answer: str, gold: str, options: dict[str, Any]) -> list[Any]:
    from rewards.math_answer.outcomes import Rejected
    from rewards.math_answer.verdict import Options, judge, normal_gold

    comparison = symbolic.SymbolicComparison()
    try:
        correct, reason, path = judge(answer, normal_gold(gold), Options(**options), comparison)
        return [correct, reason, "sympy" if comparison.symbolic else path]
    except (Rejected, MemoryError):
        raise
    except Exception:  # whatever sympy raises where it can't go on
        return [False, "undecided", "sympy"]


if __name__ == "__main__":
    main()
