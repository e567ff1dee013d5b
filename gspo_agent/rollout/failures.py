"""Failures: how many of the last episodes environment, engine or sandbox broke, and when that is too many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from gspo_agent import errors
from gspo_agent.errors import EnvError, GspoAgentError

WINDOW = 200
"""Episodes over which the share of failures is taken."""


class Failures:
    """Counts ended episodes. What the policy did wrong is no failure: it has a reward."""

    def __init__(self, max_failed: float, recent: Iterable[str | None] = ()) -> None:
        """
        Args:
            max_failed: Share of the window from which on there is no point in going on.
            recent: Of the last episodes, oldest first, why each failed, None where it did not; also of earlier lives.
        """
        self.causes: Counter[str] = Counter()
        """Cause -> episodes of this life."""
        self.in_a_row, self.last = 0, ""
        """How many of the last ones failed, without another between them; and the cause of the last that did."""
        self._max_failed = max_failed
        self._recent: deque[str | None] = deque(recent, maxlen=WINDOW)

    def add(self, cause: str | None) -> GspoAgentError | None:
        """Counts one episode; past the limit returns the fault to stop with, of the kind of the first cause."""
        self._recent.append(cause)
        if cause is None:
            self.in_a_row = 0
            return None
        self.in_a_row, self.last = self.in_a_row + 1, cause
        self.causes[cause] += 1
        failed = [known for known in self._recent if known is not None]
        if len(failed) <= self._max_failed * WINDOW:
            return None
        kind = getattr(errors, failed[0].partition(":")[0], EnvError)
        kind = kind if isinstance(kind, type) and issubclass(kind, GspoAgentError) else EnvError
        return (kind if kind is not errors.ReplayError else EnvError)(
            f"{len(failed)} of the last {len(self._recent)} episodes failed, more than rollout.max_failed = "
            f"{self._max_failed:g} allows; the first cause: {failed[0]}"
        )
