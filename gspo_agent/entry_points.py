"""What lives outside of the framework and is found by entry points: environments and judges. Nothing of it is imported
by name here, since a folder of the user's may have that name, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

import gspo_agent
from gspo_agent.errors import ConfigError

ENVS, JUDGES = "gspo_agent.envs", "gspo_agent.judges"


def load_judge(name: str) -> Callable[..., Any]:
    """The entry point `name` of the group gspo_agent.judges; ConfigError with the remedy."""
    known = {point.name: point for point in entry_points(group=JUDGES)}
    if name not in known:
        raise ConfigError(
            f"no judge {name!r} in the entry points {JUDGES}; install gspo_agent again (pip install -e .)"
        )
    return load_entry_point(known[name])


def load_entry_point(point: EntryPoint) -> Callable[..., Any]:
    """What it points to; ConfigError when that is missing, or when a folder of the user's stands in its place."""
    top = point.module.partition(".")[0]
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{point.name} is {point.value}: {error}{_stranger(top, point)}") from error
    if foreign := _stranger(top, point):
        raise ConfigError(f"{point.name} is {point.value}{foreign}")
    return cast(Callable[..., Any], found)


def _stranger(top: str, point: EntryPoint) -> str:
    """Says so where `import envs` finds a folder of the user's instead of the one beside this package."""
    if point.dist is None or point.dist.name.replace("-", "_") != gspo_agent.__name__:
        return ""
    home = Path(gspo_agent.__file__).parent.parent
    module = sys.modules.get(top)
    places = [Path(place).parent for place in getattr(module, "__path__", [])]
    if module is None or home in places:
        return ""
    where = places[0] / top if places else Path(getattr(module, "__file__", None) or "?")
    return (
        f"; but `import {top}` finds {where}, which is not part of gspo_agent ({home / top} is). "
        f"Start from another directory, or rename that folder"
    )
