"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.faults.zygote import Zygote

# An example may take long on a busy machine, which says nothing about what is tested.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks lives of a run; for all tests that kill some."""
    with Zygote(["tests.faults.victim"]) as zygote:
        yield zygote
