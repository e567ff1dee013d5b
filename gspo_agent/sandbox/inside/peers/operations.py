"""What can be done to an object on behalf of the other side."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable
from typing import Any


def _special(target: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(type(target), name)(target, *arguments)


def _names(module: types.ModuleType) -> list[str]:
    """What `from module import *` takes."""
    given = getattr(module, "__all__", None)
    return [name for name in vars(module) if not name.startswith("_")] if given is None else list(given)


def _plain(target: Any) -> Any:
    """A container as data, by the methods of the class that it is derived from."""
    if isinstance(target, dict):
        return dict(dict.items(target))
    kind: Any = next(kind for kind in (list, set, bytearray) if isinstance(target, kind))
    return kind(kind.__iter__(target))


def _await(target: Any) -> Any:
    import asyncio  # half of the start of a program, for the few that need it

    async def waited() -> Any:
        return await target

    # It may be asked in the middle of a loop of this side, which stands still until the other side has its answer.
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(waited())
    finally:
        asyncio._set_running_loop(outer)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, arguments, named: target(*arguments, **named),
    "method": lambda target, name, arguments, named: getattr(target, name)(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "item": operator.getitem,
    "special": _special,
    "equal": operator.eq,
    "plain": _plain,
    "names": _names,
    "is package": lambda module: hasattr(module, "__path__"),
    "repr": repr,
    "str": str,
    "dir": dir,
    "vars": lambda target: dict(vars(target)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "await": _await,
}
