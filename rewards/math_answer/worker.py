"""The process of a worker: one line of JSON with a job, one line with what came of it. Started by `workers`."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 5


def main() -> None:
    for kind, bound in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (bound, bound))
    from rewards.math_answer import symbolic  # slow to load: while nobody waits

    answers = sys.stdout
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # A worker whose parent was killed in the middle of a job ends by this.
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_SECONDS, -1))
        answers.write(json.dumps(_done(symbolic, **json.loads(line))) + "\n")
        answers.flush()


def _done(symbolic: Any, answer: str, gold: str, options: dict[str, Any]) -> list[Any]:
    from rewards.math_answer.outcomes import Rejected
    from rewards.math_answer.verdict import Options, judge, read_gold

    try:
        comparison = symbolic.SymbolicComparison()
        correct, reason, path = judge(answer, read_gold(gold), Options(**options), comparison)
        return [correct, reason, "sympy" if comparison.symbolic else path]
    except Rejected as problem:
        return [False, f"rejected:{problem}", "caps"]
    except MemoryError:
        return [False, "rejected:memory", "sympy"]
    except Exception:  # whatever sympy raises where it can't go on
        return [False, "undecided", "sympy"]


if __name__ == "__main__":
    main()
