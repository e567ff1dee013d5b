from __future__ import annotations

from collections.abc import Collection, Mapping


class Cycle(Exception):
    """Nodes that all come before themselves."""

    def __init__(self, nodes: list[str]) -> None:
        super().__init__(" -> ".join(nodes))
        self.nodes = nodes


def sort(before: Mapping[str, Collection[str]]) -> list[str]:
    """Every node after those that come `before` it."""
    waiting = [node for node in before]
    done: list[str] = []
    while waiting:
        node = waiting.pop(0)
        if all(other in done for other in before[node]):
            done.append(node)
        else:
            waiting.append(node)
    return done
