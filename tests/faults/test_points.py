"""The moments of the protocol are there: a renamed one would never be reached, and nobody would die at it."""

from __future__ import annotations

import pytest

from tests.faults.points import PLACES


@pytest.mark.parametrize("name", PLACES)
def test_every_moment_is_one_of_the_protocol(name: str) -> None:
    owner, attribute = PLACES[name]
    assert callable(getattr(owner, attribute))
