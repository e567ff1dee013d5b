"""The garbage collector during a run."""

from __future__ import annotations

import gc

from gspo_agent.background import rare_collections


def test_collections_are_rare_within_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_only_refers_to_itself_still_goes() -> None:
    class Cycle:
        living = 0

        def __init__(self) -> None:
            self.self, self.text = self, "x" * 1000
            Cycle.living += 1

        def __del__(self) -> None:
            Cycle.living -= 1

    with rare_collections():
        for _ in range(100_000):
            Cycle()
        assert Cycle.living <= 10_000
