"""A persistent interpreter, cell by cell."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox.channel import Channel, JobLost
from gspo_agent.sandbox.inside.frames import SPENT
from gspo_agent.sandbox.limits import SandboxLimits
from gspo_agent.sandbox.observation import readable
from gspo_agent.sandbox.results import CellResult

if TYPE_CHECKING:
    from gspo_agent.sandbox.sandbox import Sandbox

_ATTEMPTS = 2


class Session:
    """Variables, files and imports live from one cell to the next; between cells everything in it stands still.

        session = await sandbox.session()
        (await session.cell("x = 20\\nx + 1")).output   # "21\\n"

    Made by `Sandbox.session`. Idle it costs a few MB and no CPU. One cell at a time.
    """

    def __init__(self, sandbox: Sandbox, channel: Channel, limits: SandboxLimits) -> None:
        self._sandbox, self._channel, self.limits = sandbox, channel, limits
        self.alive = True
        """False once the process is gone: it ended itself, passed a limit that cannot be survived, or was closed."""

    @classmethod
    async def open(cls, sandbox: Sandbox, limits: SandboxLimits) -> Self:
        reason = "the job was lost"
        for _ in range(_ATTEMPTS):
            async with sandbox.turn():
                with contextlib.suppress(JobLost), contextlib.ExitStack() as cleanup:
                    channel = cleanup.enter_context(sandbox.channel())
                    await channel.send({"kind": "session", "limits": limits.as_dict()})
                    header, _ = await channel.receive(5 * limits.wall_s + 60)
                    if header["status"] == "ok":
                        cleanup.pop_all()
                        return cls(sandbox, channel, limits)
                    reason = header.get("reason", reason)
        raise SandboxError(f"no session could be opened: {reason}")

    async def cell(self, code: str, *, max_bytes: int = 8192) -> CellResult:
        """Runs one cell; shows its output and the value of a last expression.

        A cell that passes a time limit is interrupted and the variables are kept; when it does not heed that, or passes
        another limit, the session is dead. `max_bytes`: longer output is cut in the middle. SandboxError when the job
        was lost (which says nothing about the code).
        """
        if not self.alive:
            return CellResult("The session has ended; its variables are lost.\n", "dead", False, 0.0, 0.0)
        try:
            async with self._sandbox.turn():
                await self._channel.send({}, code.encode("utf-8", "surrogatepass"))
                problem, blobs = await self._channel.receive(5 * self.limits.wall_s + 60)
        except JobLost:
            self._end()
            raise SandboxError("the session was lost: its job or the fork server died") from None
        except BaseException:  # cancelled in the middle: what is running is not to go on
            self._end()
            raise
        if problem:
            self._end()
            raise SandboxError(f"the session was lost: {problem['reason']}")
        spent, encoded, written = blobs
        status: Any = encoded.decode()
        if status == "infra_error":
            self._end()
            raise SandboxError("the session was lost: it got no processor")
        alive, cpu_s, wall_s = SPENT.unpack(spent)
        if not alive:
            self._end()
        return CellResult(readable(written, max_bytes) + self._note(status), status, self.alive, cpu_s, wall_s)

    async def close(self) -> None:
        """Ends the session and everything in it."""
        self._end()

    def _end(self) -> None:
        self.alive = False
        self._channel.close()

    def _note(self, status: str) -> str:
        """What the model cannot see from the output alone."""
        if status in ("ok", "runtime_error"):
            return ""
        limits = self.limits
        said = {
            "time_limit": f"TimeoutError: stopped after {limits.cpu_s:g} s of CPU or {limits.wall_s:g} s",
            "memory_limit": f"MemoryError: stopped above {limits.memory_bytes >> 20} MiB",
            "output_limit": f"OSError: more than {limits.output_bytes} bytes of output",
            "dead": "The process ended",
        }.get(status)
        if said is None:
            return ""
        return f"{said}; variables are {'kept' if self.alive else 'lost'}.\n"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
