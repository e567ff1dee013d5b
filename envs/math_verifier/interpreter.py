"""The Python tool of one episode: a sandbox session that a later process can bring back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gspo_agent.errors import ReplayError, SandboxError
from gspo_agent.sandbox import CellResult, SandboxLimits, Session, shared_sandbox

Cell = tuple[int, str, str, str]
"""(turn, code, digest of what was observed, the beginning of it): an entry of the log that brings a session back."""
_SHOWN = 200  # characters of an observation that are kept to be shown beside another one


class Interpreter:
    """Opens a session at its first cell. Where cells were recorded and no session is open, it repeats them first and
    compares every observation."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._session: Session | None = None

    async def cell(self, turn: int, code: str, recorded: Sequence[Cell]) -> tuple[CellResult, tuple[Cell, ...]]:
        """Runs `code`, of this turn, after `recorded`; returns the result and the log that a later process needs.

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
        return result, (*recorded, (turn, code, _digest(result), result.output[:_SHOWN]))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _repeat(session: Session, recorded: Sequence[Cell]) -> None:
    for turn, code, digest, shown in recorded:
        again = await session.cell(code)
        if not again.alive:
            raise SandboxError(f"the cell of turn {turn} ended the session when it was repeated, and did not before")
        if _digest(again) != digest:
            raise ReplayError(turn, shown, again.output[:_SHOWN])


def _digest(result: CellResult) -> str:
    return hashlib.sha256(f"{result.status}\n{result.output}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
