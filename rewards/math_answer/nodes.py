"""Expressions as data.

A node is a tuple: ("num", Fraction), ("var", name), ("const", "pi" | "e" | "i"), ("+", terms), ("*", factors),
("/", a, b), ("-", a), ("^", a, b), ("root", n, a), ("fn", name, args), ("log", base, a), ("!", a), ("binom", n, k),
("|", a), ("deg", a), ("mod", a, b), ("pm", sign, a), and ("sum" | "prod" | "int", name, low, high, body),
which only computer algebra works out; a bound may be ("inf", sign).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

BIG_OPERATORS = ("sum", "prod", "int")


def variables(node: Node) -> frozenset[str]:
    """The names of the free variables."""
    if node[0] == "var":
        return frozenset((node[1],))
    found: frozenset[str] = frozenset()
    for part in node[1:]:
        if isinstance(part, tuple):
            for child in part if part and isinstance(part[0], tuple) else (part,):
                found |= variables(child)
    return found - {node[1]} if node[0] in BIG_OPERATORS else found


def differential(node: Node) -> bool:
    """Whether it may be dy, or d^2 y, rather than d times y."""
    first = node[1][0] if node[0] == "*" else node
    return (first[1] if first[0] == "^" else first) == ("var", "d")


def holds(node: Any, test: Callable[[Node], bool]) -> bool:
    """Whether a node or a part of it passes the test."""
    return isinstance(node, tuple) and bool(node) and (test(node) or any(holds(part, test) for part in node))


def placed(node: Any, point: Mapping[str, Fraction]) -> Any:
    """The node with numbers for its variables."""
    if not isinstance(node, tuple):
        return node
    if node[:1] == ("var",):
        return ("num", point[node[1]]) if node[1] in point else node
    return tuple(placed(part, point) for part in node)
