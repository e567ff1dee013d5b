"""The moments of the protocol at which a victim may die: before and after each of its steps, as it does them."""

from __future__ import annotations

import functools
import inspect
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from gspo_agent import trainer
from gspo_agent.rollout import export, journal, retention
from gspo_agent.rollout.blobs import BlobStore
from gspo_agent.rollout.collector import Collector
from gspo_agent.rollout.journal import Journal
from gspo_agent.rollout.ledger import Ledger
from gspo_agent.rollout.recorder import JournalCallLog

PLACES: dict[str, tuple[Any, str]] = {
    "open": (journal, "_begin"),
    "recover": (Ledger, "__init__"),
    "transaction": (Journal, "_transaction"),
    "blob": (BlobStore, "put"),
    "call": (JournalCallLog, "run"),
    "create": (Ledger, "create_groups"),
    "end": (Ledger, "end"),
    "lease": (Collector, "lease"),
    "batch": (trainer, "make_batch"),
    "commit": (Ledger, "commit_step"),
    "publish": (trainer, "publish"),
    "expire": (Ledger, "expire"),
    "mark": (retention, "_mark"),
    "let go": (retention, "_let_go"),
    "export": (export, "_write"),
    "stop": (Collector, "stop"),
}
"""Name -> what is wrapped. A victim adds those of its learner."""


class Points:
    """Counts how often each moment was reached; at the chosen one the process ends by kill -9."""

    def __init__(self, die_at: tuple[str, int] | None = None) -> None:
        self.die_at = die_at
        """("commit.before", 2): the second time that this moment is reached."""
        self._reached = Counter[str]()

    def aim(self, name: str, times: int) -> None:
        """Chooses another moment, `times` from now on."""
        self.die_at = (name, self._reached[name] + times)

    def reach(self, name: str) -> None:
        self._reached[name] += 1
        if self.die_at == (name, self._reached[name]):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Makes `name`.before and `name`.after of a function or coroutine function."""
        if isinstance(inspect.getattr_static(owner, attribute, None), classmethod):
            setattr(owner, attribute, staticmethod(self._wrapped(getattr(owner, attribute), name)))
        elif hasattr(owner, attribute):
            setattr(owner, attribute, self._wrapped(getattr(owner, attribute), name))

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                self.reach(f"{name}.before")
                result = await function(*args, **kwargs)
                self.reach(f"{name}.after")
                return result

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"{name}.before")
            result = function(*args, **kwargs)
            self.reach(f"{name}.after")
            return result

        return called
