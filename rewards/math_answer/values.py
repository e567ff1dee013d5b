"""What an answer can be. Comparison is by type; a value of one type is equal to one of another in few, named cases."""

from __future__ import annotations

from dataclasses import dataclass

from rewards.math_answer.nodes import Node

MAX_ITEMS = 100


@dataclass(frozen=True, slots=True)
class Scalar:
    node: Node
    unit: str | None = None
    percent: bool = False
    bare: str = ""
    """The digits as they were written, where it is a plain whole number: beside a gold answer with a base."""
    decimals: int = 0
    """How many were written, where it is a plain number."""


@dataclass(frozen=True, slots=True)
class Infinity:
    sign: int


@dataclass(frozen=True, slots=True)
class Text:
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A sign that stands for itself, such as the empty set or an ellipsis."""

    name: str


@dataclass(frozen=True, slots=True)
class Based:
    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Ratio:
    parts: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tuple, a vector, an interval: brackets and order count."""

    brackets: str
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Unordered:
    """A list or a set."""

    items: tuple[Value, ...]
    braced: bool = False

    @property
    def elided(self) -> bool:
        return Symbol("...") in self.items


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]
    factor: Node | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the real line; one point where both ends are the same node."""

    low: Scalar | Infinity
    closed_low: bool
    high: Scalar | Infinity
    closed_high: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """Pieces of the real line joined; `without` are points taken out."""

    pieces: tuple[Piece, ...]
    without: tuple[Scalar, ...] = ()
    variable: str = ""
    """Of an inequality; "" where the set was written as such."""


@dataclass(frozen=True, slots=True)
class Inequality:
    """left < right or left <= right, or != ."""

    left: Node
    right: Node
    sign: str


@dataclass(frozen=True, slots=True)
class Equation:
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Assignment:
    """name = value; a chain of equal values is its last one, with the others as `links` that must agree."""

    name: str
    value: Value
    links: tuple[Value, ...] = ()


Value = (
    Scalar
    | Infinity
    | Text
    | Symbol
    | Based
    | Ratio
    | Ordered
    | Unordered
    | Matrix
    | RealSet
    | Inequality
    | Equation
    | Assignment
)

LINE = RealSet((Piece(Infinity(-1), False, Infinity(1), False),))
