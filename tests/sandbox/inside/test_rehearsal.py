from __future__ import annotations

import itertools

from gspo_agent.sandbox.inside import rehearsal


def test_what_is_made_after_the_gaps_were_filled_lies_side_by_side() -> None:
    fillers = rehearsal.fill_gaps()
    for size in (48, 144, 512):
        made = [bytes(size - rehearsal._BYTES_HEAD) for _ in range(20)]
        distances = [id(new) - id(old) for old, new in itertools.pairwise(made)]
        assert distances.count(size) >= len(distances) - 1, distances  # one pool may have ended
    assert fillers
