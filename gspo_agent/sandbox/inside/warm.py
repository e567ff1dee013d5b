"""Modules that solutions import, loaded once in the fork server."""

from __future__ import annotations

_MODULES = (
    "array ast bisect cmath codecs collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools json linecache math operator queue random re string struct textwrap threading time traceback "
    "types typing atexit"
)


def import_all() -> None:
    for name in _MODULES.split():
        __import__(name)
