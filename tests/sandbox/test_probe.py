from __future__ import annotations

import json
import os

import pytest

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox import Sandbox, probe
from gspo_agent.sandbox.inside import escapes

LIBRARY = os.path.realpath(os.__file__)


async def test_nothing_gets_out_of_a_job(sandbox: Sandbox) -> None:
    code, stdin, limits = probe.program()
    result = await sandbox.run(code.decode(), stdin=stdin, limits=limits)
    assert (result.status, json.loads(result.stdout)) == ("ok", [])


async def test_probes_notice_what_is_visible(sandbox: Sandbox) -> None:
    """The same program, told that the interpreter's library is a secret, and with an inherited descriptor."""
    code, _, _ = probe.program()
    leak = "import os; os.environ['API_KEY'] = 'x'; os.dup2(0, 9)\n"
    source = leak + code.decode().replace("from __future__ import annotations", "")
    result = await sandbox.run(source, stdin=json.dumps({"secrets": [LIBRARY], "canary": None}))
    assert set(json.loads(result.stdout)) == {
        "descriptor 9 was inherited",
        f"{LIBRARY} is visible",
        "the variable API_KEY is visible",
    }


def test_probe_asks_for_the_framework_and_the_working_directory() -> None:
    secrets = json.loads(probe.program()[1])["secrets"]
    assert probe.__file__ in secrets
    assert any(path.startswith(os.getcwd()) for path in secrets)


def test_privileges_are_found_where_nothing_confines() -> None:
    found = escapes._privileges()
    assert "no system-call filter is installed" in found
    assert "no_new_privs is off" in found


def test_breach_refuses_the_sandbox_by_name() -> None:
    with pytest.raises(SandboxError, match=r"by ns: a network socket opened\. Nothing will be run here\. Remedy:"):
        probe.judge("ns", {"status": "ok"}, b'["a network socket opened"]')
    with pytest.raises(SandboxError, match="could not run: MemoryError"):
        probe.judge("ns", {"status": "runtime_error"}, b"", b"Traceback\nMemoryError\n")
    with pytest.raises(SandboxError, match="could not run: mount tmpfs"):
        probe.judge("ns", {"status": "infra_error", "reason": "mount tmpfs"})
