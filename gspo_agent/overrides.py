"""`section.key=value` as it is typed behind a command, put into a mapping that was read from TOML."""

from __future__ import annotations

import tomllib
from typing import Any

from gspo_agent.errors import ConfigError


def override_key(data: dict[str, Any], override: str) -> None:
    """Sets one key of nested sections; raises ConfigError where the place is none."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{override!r} is not key=value, as in learner.lr=1e-5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    node: Any = data
    for step, name in enumerate(path):
        node = _item(node, name, key) if isinstance(node, list) else node.setdefault(name, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"{key}: {'.'.join(path[: step + 1])} is a value, not a section")
    if isinstance(node, list):
        node = _item(node, "0", key)
    node[last] = value


def _item(node: list[Any], name: str, key: str) -> Any:
    """`env.limits.turns` means the only environment; `env.1.limits.turns` the second."""
    if not name.isdigit() or int(name) >= len(node):
        raise ConfigError(
            f"{key}: write the number of the [[env]] first, 0 to {len(node) - 1}, as in env.0.options.p=0.3"
        )
    return node[int(name)]
