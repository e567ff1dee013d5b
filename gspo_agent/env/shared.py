"""Shared: what all episodes of one environment have in common, opened once and closed once."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from gspo_agent.env.options import accepted
from gspo_agent.env.threads import Lane, run_sync
from gspo_agent.errors import EnvError, boundary

_log = logging.getLogger(__name__)
CLOSE_SECONDS = 30.0


class Shared:
    """Opens `owner.open_shared(**options)` when it is first needed; whoever comes meanwhile waits for that."""

    def __init__(self, owner: Any, options: Mapping[str, Any]) -> None:
        self._owner, self._options = owner, dict(options)
        self._lane = Lane()
        self._lock = threading.Lock()
        self._opened: Future[Any] | None = None

    async def get(self) -> Any:
        """The shared object. Raises EnvError where opening failed; the next caller tries again."""
        with self._lock:
            opened, first = self._opened, self._opened is None
            if opened is None:
                opened = self._opened = Future()
        if not first:
            return await asyncio.wrap_future(opened)
        try:
            opened.set_result(
                await self._call(self._owner.open_shared, **accepted(self._owner.open_shared, self._options))
            )
        except BaseException as error:
            with self._lock:
                self._opened = None
            cancelled = EnvError(f"{self._owner.__name__}.open_shared was cancelled")
            opened.set_exception(error if isinstance(error, Exception) else cancelled)
            raise
        return opened.result()

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Closes what was opened; once. Nobody waits longer than `seconds` for it; past them it is left to itself."""
        with self._lock:
            opened, self._opened = self._opened, None
        try:
            if opened is not None and opened.done() and opened.exception() is None:
                async with asyncio.timeout(seconds):
                    await self._call(self._owner.close_shared, opened.result())
        except TimeoutError:
            _log.warning("%s.close_shared took longer than %g s; it is left to itself", self._owner.__name__, seconds)
        finally:
            self._lane.release()

    async def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with boundary(EnvError, f"{self._owner.__name__}.{function.__name__}"):
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            return await self._lane.run(lambda: function(*args, **kwargs))


_direct: dict[type, Shared] = {}


def shared_of(owner: type) -> Shared:
    """For instances that no factory made: one for each class, closed when the process ends."""
    if owner not in _direct:
        shared = _direct.setdefault(owner, Shared(owner, {}))
        atexit.register(lambda: run_sync(shared.close()))
    return _direct[owner]
