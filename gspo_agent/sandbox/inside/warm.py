"""Modules that solutions import, loaded once in the fork server.

Not `threading` and `random`: both do something after every fork, which costs each job half a millisecond. What they
import is here, so that whoever wants them waits little longer than that.
"""

from __future__ import annotations

import contextlib
import sys

_MODULES = (
    "_sha512 _sha2 _weakrefset array ast atexit bisect cmath codecs collections contextlib copy dataclasses datetime "
    "decimal enum fractions functools heapq io itertools json linecache math numbers operator re string struct "
    "textwrap time traceback types typing warnings"
)


def import_all() -> None:
    for name in _MODULES.split():
        with contextlib.suppress(ImportError):  # _sha512 became _sha2 in Python 3.12
            __import__(name)


def import_packages(directories: list[str]) -> None:
    """Of those that a fork server has beside the standard library, what runs tests."""
    sys.path += directories
    import pytest as pytest
