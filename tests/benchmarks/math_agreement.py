"""Where the verifier and math-verify 0.9.0 disagree, and who is right.

    python -m tests.benchmarks.math_agreement TESTS [--markdown FILE]

TESTS is the folder `tests` of math-verify's source, which is installed; its inputs are run from there. The other sets:
`PAIRS`, short answers in the style of the pairs that graders of MATH are tested with, and the corpus of this project.
What they disagree about in those tests, and whatever else is
not as expected, stands in `math_agreement.json`: who is right and why. Exit status 1 where one has none, and
where the verifier accepts what is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import math_verify

import tests as our_tests
from rewards.math_answer import Verdict, Workers
from tests.rewards.math_answer.test_verdict import CASES, text_of

HERE = Path(__file__)
JUDGED = HERE.with_suffix(".json")
"""Input -> [who is right ("ours", "theirs", "both", "neither", "policy"), why]."""
PAIRS: list[tuple[str, str, bool]] = [
    ("0.5", r"\frac{1}{2}", True), (".5", r"\frac12", True), ("1/2", r"\dfrac{1}{2}", True),
    ("-1/2", r"-\frac{1}{2}", True), (r"\frac{-1}{2}", r"-\frac{1}{2}", True),
    (r"\frac{1}{-2}", r"-\frac{1}{2}", True), ("0.33", r"\frac{1}{3}", False), ("0.333333", r"\frac{1}{3}", False),
    ("2.5", r"2\frac{1}{2}", True), ("2 1/2", r"\frac52", True), (r"-1\frac14", "-1.25", True),
    (r"-1\frac14", r"-\frac{3}{4}", False), ("10,000", "10000", True), ("10{,}000", "10000", True),
    (r"10\,000", "10000", True), ("$10,000", r"\$10000", True), ("1,0000", "10000", False),
    ("10.000", "10000", False), ("3 dollars", "3", True), ("5 cm", r"5\text{ cm}", True),
    ("5 cm", r"5\text{ m}", False), (r"60^\circ", "60", True), ("60 degrees", r"60^{\circ}", True),
    (r"50\%", "50", True), ("50%", "0.5", True), ("50", "0.5", False), ("x=5", "5", True),
    ("y = 13", "x = 13", False), ("5 = x", "x=5", True), ("x = 4 = 5", "5", False), ("(1,2)", "(1, 2)", True),
    ("(2,1)", "(1,2)", False), ("1,2", "2,1", True), ("[1,2]", "(1,2)", False),
    (r"(-\infty, 3]", r"(-\infty,3]", True), (r"(-\infty, 3)", r"(-\infty,3]", False),
    (r"x \le 3", r"(-\infty,3]", True), (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)", True),
    (r"\{1,2,3\}", "1,2,3", True), (r"\{1,2\}", r"\{1,2,2\}", True), (r"\{1,2\}", "1", False),
    ("1 and 2", "1", False), ("1", "1 and 2", False), (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\sqrt{8}", "2.828", False), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}", True), (r"2\pi", "6.28318", False),
    (r"2\pi", r"\pi\cdot 2", True), ("2pi", r"2\pi", True), (r"e^{i\pi}", "-1", True), ("i^2", "-1", True),
    (r"|3+4i|", "5", True), (r"\sin 30^\circ", r"\frac12", True), (r"\log_2 8", "3", True),
    (r"\ln 5", r"\ln 2+\ln 3", False), (r"\ln 6", r"\ln 2+\ln 3", True), ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x-1)^2", False), ("(x+1)(x-1)", "x^2-1", True), ("2(x+y)", "2x+2y", True), ("ab", "ba", True),
    ("a/b", r"\frac{a}{b}", True), ("a/b", r"\frac{b}{a}", False), ("1/3^{60}", "1/3^{61}", False),
    (r"\frac{1}{2^n}", r"\frac{1}{2^{n-1}}", False), (r"\sqrt{\frac1n}", r"\frac{1}{\sqrt n}", True),
    ("12345678901234567891", "12345678901234567890", False), ("2^{53}+1", "2^{53}", False),
    ("2104_5", "2104_6", False), ("101_2", "5", False), (r"\text{(C)}", "C", True), (r"\textbf{(C)}\ 7", "7", False),
    (r"\text{Evelyn}", r"\text{evelyn}", True), (r"\text{yes}", r"\text{no}", False), ("4.2e7", "42000000", True),
    (r"4.2\times 10^7", "42000000", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
    ("0.\\overline{3}", r"\frac13", True), (r"\sqrt[3]{-8}", "-2", True), (r"3 \pm 2", "1, 5", True),
    (r"\pm 3", "3", False), ("5!", "120", True), ("7 3", "73", False), (r"\infty", r"-\infty", False),
    (r"\emptyset", r"\{\}", True), ("3:4", r"\frac{3}{4}", True), ("3:4", "6:8", True),
]  # fmt: skip
"""(answer, gold, whether it is right)."""


@dataclass(frozen=True, slots=True)
class Input:
    id: str
    text: str
    gold: str
    expected: bool
    why: str = ""


def theirs(folder: Path) -> Iterator[Input]:
    """Every input of math-verify's own tests that has a gold answer and an expected verdict."""
    our_tests.__path__.append(str(folder))  # they import each other as tests.NAME
    for file in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"tests.{file.stem}")
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", ()):
                fields = [field.strip() for field in mark.args[0].split(",")] if mark.name == "parametrize" else []
                if {"gold", "pred"} <= set(fields):
                    for number, values in enumerate(mark.args[1]):
                        row = dict(zip(fields, values, strict=True))
                        right = bool(row.get("expected", row.get("result")))
                        yield Input(f"{file.stem}.{name}[{number}]", row["pred"], row["gold"], right)


def pairs() -> Iterator[Input]:
    for answer, gold, right in PAIRS:
        yield Input(f"{answer} | {gold}", rf"The answer is $\boxed{{{answer}}}$.", gold, right)


def corpus() -> Iterator[Input]:
    for case in CASES:
        if not case.get("hostile") and not case.get("opts"):
            yield Input(case["id"], text_of(case), case["gold"], case["expected"], case["why"])


_TARGETS = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]


def their_verdict(given: Input) -> tuple[bool, str | None]:
    """As its own tests ask; and the answer that it found, as it was written."""
    gold = given.gold if "$" in given.gold or "boxed" in given.gold else f"${given.gold}$"
    answer = math_verify.parse(given.text, _TARGETS)
    written = next((part for part in answer if isinstance(part, str)), None)
    return bool(math_verify.verify(math_verify.parse(gold, _TARGETS), answer)), written


def our_verdict(given: Input, written: str | None, workers: Workers) -> Verdict:
    """Ours. math-verify's tests have texts without a box or an anchor: there, about the answer that it found."""
    verdict = workers.judge(given.text, given.gold)
    if verdict.reason != "no_answer:no_box" or written is None or not given.id.startswith("test_"):
        return verdict
    return workers.judge(rf"\boxed{{{written}}}", given.gold)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="math-verify's own tests")
    parser.add_argument("--markdown", type=Path, help="where the tables go")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    judged = json.loads(JUDGED.read_text())
    problems: list[str] = []
    counted = ["| inputs | number | agree | ours right | theirs right | policy | wrong, accepted by ours | by theirs |"]
    counted.append("|---|---|---|---|---|---|---|---|")
    listed = ["| input | ours | theirs | right | why |", "|---|---|---|---|---|"]
    sets = {"math-verify's tests": theirs(arguments.tests), "pairs": pairs(), "corpus": corpus()}
    with Workers() as workers:
        for name, inputs in sets.items():
            counts: Counter[str] = Counter()
            for given in inputs:
                other, written = their_verdict(given)
                verdict = our_verdict(given, written, workers)
                mine = verdict.correct
                who, why = judged.get(given.id, ("", given.why))
                if not who and name != "math-verify's tests":
                    who = "" if mine != given.expected else "ours" if mine != other else "both"
                right = {"ours": mine, "theirs": other, "both": mine, "neither": not mine}.get(who)
                counts["number"] += 1
                counts["agree"] += mine == other
                counts[who] += mine != other
                counts["accepted by ours"] += mine and right is False
                counts["accepted by theirs"] += other and right is False
                if not who and (mine != other or mine != given.expected):
                    problems.append(
                        f"{name}: {given.id}: ours {mine} ({verdict.reason}, {verdict.extracted!r}), theirs {other}, "
                        f"expected {given.expected}; gold {given.gold[-100:]!r}; text {given.text[-160:]!r}"
                    )
                if mine != other:
                    cells = [_cell(given.id), verdict.reason, "yes" if other else "no", who, _cell(why)]
                    listed.append(f"| {' | '.join(cells)} |")
            cells = ["number", "agree", "ours", "theirs", "policy", "accepted by ours", "accepted by theirs"]
            counted.append(f"| {name} | " + " | ".join(str(counts[cell]) for cell in cells) + " |")
            if counts["accepted by ours"]:
                problems.append(f"{name}: {counts['accepted by ours']} wrong answers are accepted by ours")
    print("\n".join([*counted, "", *problems]))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join([_TITLE, *counted, "", *listed]) + "\n")
    sys.exit(bool(problems))


_TITLE = """# Beside math-verify 0.9.0

Made by `python -m tests.benchmarks.math_agreement TESTS --markdown FILE`, from the inputs of math-verify's own tests,
from pairs in the style of those that graders of MATH are tested with, and from the corpus in `tests/cases/math.json`.
Policy: mathematics does not say who is right. Texts of the former tests without a box or an anchor are judged here by
the answer that math-verify found.
"""


def _cell(text: str) -> str:
    """Inside a table of Markdown."""
    return f"`{text}`".replace("|", "\\|") if "\\" in text else text.replace("|", "\\|")


if __name__ == "__main__":
    main()
