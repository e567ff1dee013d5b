"""Faults of every kind done to runs of every mode; what was promised is then counted from outside.

    python -m tests.campaign --faults 500 --seed 0

Exit status 1 on any loss. The table of faults by kind and outcome comes last. What is done is a function of the seed;
when it hits is decided by the machine, except where a process dies at a named step of the protocol.

    python -m tests.campaign --faults 10 --train examples/math.toml run.dir=/tmp/campaign

kills a real training run (a process that starts in seconds, with everything in it) at random moments instead; with
rollout.mode=async, half of the kills are of the learner's own process.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.faults.campaign import Campaign
from tests.faults.faults import KINDS
from tests.faults.sabotage import SABOTAGES
from tests.faults.scenario import MODES
from tests.faults.training import kill_training


def parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name}" for name in KINDS)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nkinds of faults:\n{kinds}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="KIND", help="faults whose name has this in it")
    parser.add_argument("--mode", choices=MODES, help="runs of this mode only")
    parser.add_argument("--engine", choices=("scripted", "local"), help="runs with this engine only")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="break a guarantee: losses are expected")
    parser.add_argument("--keep", action="store_true", help="leave the directories of runs with a loss")
    parser.add_argument("--train", nargs="+", metavar="CONFIG", help="a TOML file and key=value changes")
    parser.add_argument("--least", type=float, default=8.0, help="--train: seconds before a kill, at least")
    parser.add_argument("--most", type=float, default=40.0, help="--train: and at most")
    return parser


def main() -> int:
    given = parser().parse_args()
    if given.train:
        return kill_training(given.train, given.faults, given.seed, given.least, given.most)
    if given.only and not any(given.only in kind for kind in KINDS):
        parser().error(f"no kind of fault has {given.only!r} in its name")
    show = _Progress()
    campaign = Campaign(
        number=given.faults, seed=given.seed, only=given.only, mode=given.mode, engine=given.engine,
        sabotage=given.sabotage, keep=given.keep, show=show,
    )  # fmt: skip
    report = campaign.run()
    show.end()
    print(report)
    return int(bool(report.losses))


class _Progress:
    """One line that is written over; on a pipe, one line in ten."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, line: str) -> None:
        self._calls += 1
        if sys.stderr.isatty():
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        elif self._calls % 10 == 1:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
