"""The Python tool of one episode: a sandbox session that a later process can bring back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gspo_agent.errors import ReplayError, SandboxError
from gspo_agent.sandbox import CellResult, SandboxLimits, Session, shared_sandbox

Cell = tuple[str, str]
"""(code, digest of what was observed): one entry of the log from which a session is brought back."""


class Interpreter:
    """Opens a session at its first cell. Where cells were recorded and no session is open, it repeats them first and
    compares every observation."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._session: Session | None = None

    async def cell(self, code: str, recorded: Sequence[Cell]) -> tuple[CellResult, tuple[Cell, ...]]:
        """Runs `code` after `recorded`; returns the result and the log that a later process needs.

        A session that ended leaves an empty log: the next cell begins a new one. ReplayError where a repeated cell
        answers differently, SandboxError where the isolation failed.
        """
        session = self._session
        if session is None or not session.alive:
            session = self._session = await shared_sandbox().session(self.limits)
            await _repeat(session, recorded)
        result = await session.cell(code)
        if not result.alive:
            return result, ()
        return result, (*recorded, (code, _digest(result)))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _repeat(session: Session, recorded: Sequence[Cell]) -> None:
    for turn, (code, digest) in enumerate(recorded):
        again = await session.cell(code)
        if not again.alive:
            raise SandboxError(f"cell {turn} ended the session when it was repeated, and did not the first time")
        if _digest(again) != digest:
            raise ReplayError(turn, digest, _digest(again))


def _digest(result: CellResult) -> str:
    return hashlib.sha256(f"{result.status}\n{result.output}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
