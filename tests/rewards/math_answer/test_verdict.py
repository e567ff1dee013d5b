"""The math verifier on its corpus: nothing wrong is accepted; what is not understood is said to be undecided."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.math_answer import MAX_ANSWER_CHARS, Options, Workers, extract, gold_problem, verify
from rewards.math_answer.normal import normalise

_FILES = Path(__file__).parents[2] / "cases"
CASES: list[dict[str, Any]] = json.loads((_FILES / "math.json").read_text())["cases"]
ATTEMPTS: list[dict[str, Any]] = json.loads((_FILES / "math_attempts.json").read_text())["cases"]


def text_of(case: dict[str, Any]) -> str:
    return case["text"] if "text" in case else "".join(part * times for part, times in case["text_parts"])


def boxed(answer: str, gold: str) -> str:
    return verify(rf"so \boxed{{{answer}}}", gold).reason


@pytest.mark.parametrize("case", [c for c in CASES if not c["expected"]], ids=lambda case: case["id"])
def test_nothing_wrong_is_accepted(case: dict[str, Any]) -> None:
    for anchors in (True, False):
        verdict = verify(text_of(case), case["gold"], anchors=anchors, **case.get("opts", {}))
        assert not verdict.correct, verdict
        assert verdict.scored
        assert verdict.ms < 1000 * case["time_limit_s"]


@pytest.mark.parametrize("case", [c for c in CASES if c["expected"]], ids=lambda case: case["id"])
def test_every_right_answer_of_the_corpus_is_accepted(case: dict[str, Any]) -> None:
    verdict = verify(text_of(case), case["gold"], **case.get("opts", {}))
    assert verdict.correct, verdict
    assert verdict.ms < 1000 * case["time_limit_s"]


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in ATTEMPTS}))
def test_attempts_to_make_it_wrong_get_the_verdict_of_a_careful_teacher(kind: str) -> None:
    judged = [
        (case, verify(case["text"], case["gold"], **case.get("opts", {}))) for case in ATTEMPTS if case["kind"] == kind
    ]
    wrong = [(case, verdict) for case, verdict in judged if verdict.correct != case["expected"] or not verdict.scored]
    assert not wrong


@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_fractions_are_equal_exactly_when_their_values_are(a: Fraction, b: Fraction) -> None:
    answer = (
        rf"-\frac{{{-a.numerator}}}{{{a.denominator}}}" if a < 0 else rf"\dfrac{{{a.numerator}}}{{{a.denominator}}}"
    )
    assert verify(rf"\boxed{{{answer}}}", str(b)).correct == (a == b)
    assert verify(rf"\boxed{{{answer}}}", f"{3 * a.numerator}/{3 * a.denominator}").correct


@given(st.text(max_size=60))
def test_any_text_gets_a_verdict_and_none_is_correct_by_accident(text: str) -> None:
    verdict = verify(text, "918273645")
    digits = "".join(str(unicodedata.decimal(letter, "")) for letter in text)
    assert not verdict.correct or "918273645" in digits


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("046", "46"), ("48{,}750", "48750"), ("0.50", r"\frac12"), (r"2\frac{3}{5}", "13/5"), ("2 3/5", "2.6"),
        ("3^{4}", "81"), (r"4.2 \times 10^{7}", "42000000"), (r"x = 2^4 = 16", "16"), (r"\{8, 3\}", "3, 8"),
        (r"\left(4,-7\right)", "(4,-7)"), (r"[2,\frac{18}{2}]", "[2,9]"), (r"\text{(C)}", "C"), ("−18", "-18"),
        (r"\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
        ("(3,2)", "(p,q)=(3,2)"), (r"(x, y) = (5, 8) \quad \text{and} \quad (8, 5)", "(5,8), (8,5)"), ("{1,3}", "1, 3"),
        ("-12, -11", "-12;-11"), ("(0, 0), (1, 2)", "(0;0),(1;2)"), ("{k = 45}, {n = 2}", "k=45, n=2"),
        (r"11,\! 111,\! 100", "11111100"), ("28 pct", r"28\%"), ("１２", "12"),
        (r"\boxed{58}", "58"), ("58.", "58"), (r"\displaystyle 58", r"\(58\)"),
    ],
)  # fmt: skip
def test_one_value_in_two_spellings_is_equal(answer: str, gold: str) -> None:
    assert boxed(answer, gold).startswith("equal:")


@pytest.mark.parametrize(
    ("answer", "gold", "reason"),
    [
        ("7 3", "73", "undecided"),  # not glued
        ("72 = 73", "73", "different:chain"),  # every link of a chain
        ("x=13", "y=13", "different:name"),
        ("10^12", "1000000000000", "undecided"),  # TeX raises the 1 only
        ("73, 74", "73", "different:type"),
        ("73; 74", "73", "different:type"),
        ("(1,5; 2)", "(1.5,2)", "undecided"),  # some write decimals with a comma
        ("x=8, y=5", "(y,x)=(8,5)", "different:chain"),
        ("(x,y)=5", "5", "undecided"),
        (r"[\begin{array}{cc} 1 & 2 \end{array}]", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "different:matrix"),
        ("(4,-7)", "(-7,4)", "different:tuple"),
        ("(2,9)", "[2,9]", "different:tuple"),
        ("(1,234)", "1234", "different:type"),  # in brackets a comma makes a pair
        ("12345678901234567891", "12345678901234567890", "different:num"),
        ("9^{9^{9^9}}", "9", "rejected:too_large"),
        ("2^{99999}", "9", "rejected:too_large"),
        ("999^{4999}", "9", "rejected:too_large"),
        ("2^3^2", "512", "rejected:tower"),
        ("1" * (MAX_ANSWER_CHARS + 1), "1", "rejected:too_long"),
        ("(" * 41 + "1" + ")" * 41, "1", "rejected:too_deep"),
        ("1\x00", "1", "rejected:control_characters"),
        ("1/0", "1", "different:undefined"),
        ("5", "1/0", "gold_invalid"),
        ("5", " ", "gold_invalid"),
    ],
)
def test_what_is_not_equal_says_why(answer: str, gold: str, reason: str) -> None:
    assert boxed(answer, gold) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{7} and then \boxed{9", "no_answer:unclosed_box"),
        (r"\boxed{7} \boxed{}", "no_answer:empty_box"),
        (r"<think>\boxed{7}", "no_answer:open_thinking"),
        ("it is 7", "no_answer:no_box"),
        (r"\boxed{2\boxed{7}}", "no_answer:mixed_box"),
        (r"\boxed{7}\boxed{8}", "different:type"),
        (r"\[ \boxed{8} \quad \text{and} \quad \boxed{7}. \]", "different:type"),
        (r"\(\boxed{8}\) and \(\boxed{7}\)", "different:type"),
        (r"\boxed{5} plus two is \boxed{7}", "equal:text"),
        (r"<think>\boxed{5}</think>\fbox{7}", "equal:text"),
        (r"\boxed {7} or \boxed{7}", "equal:text"),
    ],
)
def test_only_the_last_box_outside_thinking_counts(text: str, reason: str) -> None:
    assert verify(text, "7", anchors=False).reason == reason


def test_an_anchor_counts_only_where_it_is_asked_for_and_not_when_hedged() -> None:
    assert verify("The answer is 27.", "27").correct
    assert not verify("The answer is 27.", "27", anchors=False).correct
    assert verify("The answer is not 27.", "27").reason == "no_answer:hedged"
    assert extract(r"The answer is 26. \boxed{27}") == "27"


def test_a_gold_answer_may_stand_in_a_box_or_behind_hashes() -> None:
    assert boxed("72", r"thus $\boxed{72}$").startswith("equal")
    assert boxed("72", "18 * 4 = 72\n#### 72").startswith("equal")


MONSTERS = [
    "9^{9^{9^9}}", "9^{9^{9^{9^9}}}", "10^{10^{10}}", r"\frac{1}{9^{9^9}}", "(9^{99999})!", r"\sqrt[9^9]{9^{9^9}}",
    "9" * 20_000, "{" * 5000 + "1" + "}" * 5000, "(" * 5000, r"\frac{1}{" * 500 + "2" + "}" * 500, "1+" * 9000 + "1",
    "-" * 9000 + "1", "2^{" * 300 + "2" + "}" * 300,
]  # fmt: skip


def test_verdicts_are_the_same_in_every_thread_and_on_the_event_loop_and_use_no_signal() -> None:
    """What would take forever to work out gets its verdict at once, wherever it is asked for: there is no alarm, which
    only a main thread can set, nor a process that could hang."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    pairs = [(a, b) for a in [*MONSTERS, "7", r"\frac12"] for b in ("7", "0.5", "9^{9^{9^9}}")]

    def judged(pair: tuple[str, str]) -> tuple[bool, str]:
        verdict = verify(rf"so \boxed{{{pair[0]}}}", pair[1])
        return verdict.correct, verdict.reason

    async def on_the_loop() -> list[tuple[bool, str]]:
        return [judged(pair) for pair in pairs]

    here = [judged(pair) for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(judged, pairs)) == here
    assert asyncio.run(on_the_loop()) == here
    assert signal.getsignal(signal.SIGALRM) == handler
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(timer[0])  # the tests' own timer still runs
    right = [pair for pair, (correct, _) in zip(pairs, here, strict=True) if correct]
    assert set(right) - {("9^{9^{9^9}}",) * 2} == {("7", "7"), (r"\frac12", "0.5")}


def test_the_corpus_is_judged_alike_in_threads_and_on_an_event_loop_and_no_payload_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def right(case: dict[str, Any]) -> bool:
        return verify(text_of(case), case["gold"], **case.get("opts", {})).correct

    async def on_the_loop() -> list[bool]:
        return [right(case) for case in CASES]

    expected = [case["expected"] for case in CASES]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(right, CASES)) == expected
    assert asyncio.run(on_the_loop()) == expected
    assert not list(tmp_path.iterdir())
    assert not [*Path("/tmp").glob("PWNED*"), *Path.home().glob("PWNED*")]


@pytest.mark.slow
async def test_the_corpus_is_judged_alike_with_workers_and_each_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = asyncio.Semaphore(64)
    with Workers(cpu_s=2) as workers:

        async def compared(case: dict[str, Any]) -> None:
            options = case.get("opts", {})
            async with places:
                verdict = await workers.verify(text_of(case), case["gold"], Options(**options))
            assert verdict.correct == case["expected"], (case["id"], verdict)
            assert verdict.scored
            here = verify(text_of(case), case["gold"], **options)
            if here.reason != "undecided":
                assert verdict == replace(here, ms=verdict.ms)

        await asyncio.gather(*map(compared, CASES))
    written = [*os.listdir(tmp_path), *os.listdir("/")]  # the second is where a worker is
    assert not [name for name in written if name.startswith("PWNED")]


def test_every_gold_answer_of_the_corpus_is_equal_to_itself() -> None:
    problems = {case["id"]: gold_problem(case["gold"], Options(**case.get("opts", {}))) for case in CASES}
    assert {id: problem for id, problem in problems.items() if problem} == {}


def test_normal_forms_glue_no_digits() -> None:
    assert normalise("7 3") == "7 3"
    assert normalise("10^{1}2") == "10^{1}2"
    assert normalise(r"3 \, + \, x ^ {2}") == "3+x^2"


def test_no_computer_algebra_is_loaded_and_no_numbers_either_before_they_are_needed() -> None:
    code = r"""
import re, sys
from rewards.math_answer import verify
assert verify(r"\boxed{\frac{1}{2}}", "0.5").correct
assert "mpmath" not in sys.modules
assert verify(r"\boxed{\sqrt{12}}", r"2\sqrt{3}").correct
assert "sympy" not in sys.modules and "torch" not in sys.modules
print(int(re.search(r'VmHWM:\s*(\d+)', open('/proc/self/status').read())[1]) // 1024)  # getrusage counts the parent
"""
    megabytes = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert megabytes < 150
