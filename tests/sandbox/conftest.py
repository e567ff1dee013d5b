from __future__ import annotations

from collections.abc import Iterator

import pytest

from gspo_agent.sandbox import Sandbox
from tests.sandbox import survivors


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One sandbox for all tests; when it is closed, nothing of any job is left."""
    shared = Sandbox()
    server = shared.server()
    yield shared
    below = survivors.descendants(server.pid)
    shared.close_now()
    assert not survivors.alive(below)
