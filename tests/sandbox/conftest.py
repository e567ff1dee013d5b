from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_agent.sandbox import Sandbox, SandboxSettings
from tests.sandbox import confinement, survivors


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One sandbox for all tests; when it is closed, nothing of any job is left."""
    shared = Sandbox()
    shared.server()
    yield shared
    servers = [server for server in shared.servers() if server.alive]
    below = set().union(*(survivors.descendants(server.pid) for server in servers))
    shared.close_now()
    assert not survivors.alive(below)


@pytest.fixture(scope="session", params=["docker", pytest.param("restricted", marks=pytest.mark.slow)])
def contained(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """What "auto" chooses in a container's default confinement, as root and as an ordinary user."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        python = confinement.wrapped(request.param, Path(directory))
        if python is None:
            pytest.skip(f"no interpreter for {request.param}: it takes root, and a Python that every user may run")
        before = survivors.traces().files
        shared = Sandbox(SandboxSettings(python=python))
        server = shared.server()
        own = survivors.traces().files - before
        yield shared
        below = survivors.descendants(server.pid)
        shared.close_now()
        assert not survivors.alive(below)
        assert own
        assert not own & survivors.traces().files
