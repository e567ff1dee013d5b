from __future__ import annotations

from collections.abc import Iterator

import pytest

from gspo_agent.sandbox import Sandbox
from tests.sandbox import survivors


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One sandbox for all tests; when it is closed, nothing of any job is left."""
    shared = Sandbox()
    shared.server()
    yield shared
    servers = [server for server in (shared._server, shared._testing) if server and server.alive]
    below = set().union(*(survivors.descendants(server.pid) for server in servers))
    shared.close_now()
    assert not survivors.alive(below)
