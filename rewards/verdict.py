"""What a judgement came to, and how it is put into one line that is safe to show to the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Class = Literal[
    "pass",
    "wrong_answer",
    "runtime_error",
    "compile_error",
    "time_limit",
    "memory_limit",
    "output_limit",
    "task_error",  # the tests themselves cannot be used
    "infra_error",  # the sandbox failed
]


_EXCEPTION = re.compile(r"^(?:\w+\.)*([A-Za-z_]\w*)(?::|$)")


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """One test. `output` and `error` are for tests that the model may see."""

    __test__ = False  # not for pytest to collect

    verdict: Class
    reason: str
    """One line without inputs and expected outputs."""
    output: str
    """What the code printed or returned, shortened."""
    error: str
    """Its traceback or standard error, shortened."""
    ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """All tests of one solution: "pass" when every test passed, else the class of the first that did not."""

    verdict: Class
    passed: int
    total: int
    reason: str
    """One line that is safe to show to the model."""
    tests: list[TestVerdict]
    """In order; shorter than `total` when the judge stopped at a failure."""
    ms: float

    @property
    def scored(self) -> bool:
        """False when the code was not judged (task_error, infra_error): never to be read as reward 0."""
        return self.verdict not in ("task_error", "infra_error")

    @property
    def fraction(self) -> float:
        """The share of tests that passed."""
        return self.passed / self.total if self.total else 0.0


def explain(verdict: Class, error: str) -> str:
    """The class in words; of an exception only the type, because its message may carry a hidden input."""
    words = verdict.replace("_", " ")
    if verdict in ("runtime_error", "compile_error"):
        lines = error.strip().splitlines()
        name = _EXCEPTION.match(lines[-1]) if lines else None
        return f"{words} ({name[1][:60]})" if name else words
    return words


def summary(tests: list[TestVerdict], total: int, ms: float) -> Verdict:
    passed = sum(test.verdict == "pass" for test in tests)
    failures = [(number, test) for number, test in enumerate(tests, 1) if test.verdict != "pass"]
    if passed == total:
        return Verdict("pass", passed, total, f"all {total} tests passed", tests, ms)
    # What was not judged outweighs what was: the share of tests that passed is not known then.
    unscored = [(number, test) for number, test in failures if test.verdict in ("infra_error", "task_error")]
    number, first = (unscored or failures)[0]
    reason = f"{passed} of {total} tests passed; test {number}: {first.reason}"
    return Verdict(first.verdict, passed, total, reason, tests, ms)
