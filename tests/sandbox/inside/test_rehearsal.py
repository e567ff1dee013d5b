from __future__ import annotations

import subprocess
import sys

from tests.sandbox import confinement

PROGRAM = """
import itertools
from gspo_agent.sandbox.inside import rehearsal
fillers = rehearsal.fill_gaps()
for size in (48, 144, 512):
    made = [bytes(size - rehearsal._BYTES_HEAD) for _ in range(20)]
    distances = [id(new) - id(old) for old, new in itertools.pairwise(made)]
    assert distances.count(size) >= len(distances) - 1, distances  # one pool may have ended
"""


def test_what_is_made_after_the_gaps_were_filled_lies_side_by_side() -> None:
    """In a process that has not yet done much else, as the fork server."""
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=confinement.ROOT, timeout=30, check=True)
