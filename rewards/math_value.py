"""Rational numbers and collections of them, read completely or not at all, by a small parser."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

MAX_ITEMS = 100
MAX_EXPONENT = 5000
MAX_BITS = 20_000


class Rejected(Exception):
    """Over a cap; the message is the reason."""


class _Unread(Exception):
    """Not of the forms that are read here."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Several values: ordered with brackets, or an unordered list or set."""

    kind: str
    """"(", "[" and so on, both brackets, for what is ordered; "" for lists and sets."""
    items: tuple[Fraction, ...]

    def same(self, other: Collection) -> bool:
        if self.kind != other.kind:
            return False
        return self.items == other.items if self.kind else Counter(self.items) == Counter(other.items)


Value = Fraction | Collection

_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DIGIT_GROUPS = re.compile(r"-?\d{1,3}(?: \d{3})+")


def read_value(text: str) -> Value | None:
    """The value of a normalised answer; None where any part of it is not understood. Raises Rejected over a cap."""
    if _THOUSANDS.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if _DIGIT_GROUPS.fullmatch(text):
        return Fraction(text.replace(" ", ""))
    try:
        return _collection(text) or _number(text)
    except (_Unread, ZeroDivisionError):
        return None


def _collection(text: str) -> Collection | None:
    """None for what has no comma outside brackets, or outside its own pair of brackets."""
    opening, closing, inner = "", "", text
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner = text[2:-2]
        return _unordered(inner)
    if text[:1] in "([" and text[-1:] in ")]" and _pair_encloses(text):
        opening, closing, inner = text[0], text[-1], text[1:-1]
    parts = _split(inner)
    if len(parts) < 2:
        if opening and opening + closing != "()":
            raise _Unread
        return None
    if any(re.fullmatch(r"\d{3}", part) for part in parts[1:]) and ", " not in inner and "{" not in inner:
        raise _Unread  # "(1,234)": a pair or a number
    if opening:
        return Collection(opening + closing, tuple(map(_number, parts)))
    return _unordered(inner)


def _unordered(inner: str) -> Collection:
    items = tuple(map(_number, _split(inner)))
    if len(set(items)) != len(items):
        raise _Unread
    return Collection("", items)


def _pair_encloses(text: str) -> bool:
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Cut at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    if len(parts) > MAX_ITEMS:
        raise Rejected("too_many_items")
    return [part.strip() for part in parts]


_TOKEN = re.compile(
    r"(?P<mixed>\d+ \d+/\d+(?![\d.]))|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<frac>\\frac(?![A-Za-z]))"
    r"|(?P<times>\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*(?!\*))|(?P<over>\\div(?![A-Za-z])|/)|(?P<other>[-+^(){}])| "
)


def _number(text: str) -> Fraction:
    return _Parser(text).whole()


class _Parser:
    """sum := product (("+" | "-") product)*; product := power (("*" | "/") power)*; power := atom ["^" power]."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _Unread
            if match.lastgroup:
                self.tokens.append((match.lastgroup, match[0]))
            position = match.end()
        self.position = 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.position != len(self.tokens):
            raise _Unread
        return value

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")

    def take(self, text: str) -> None:
        if self.peek()[1] != text:
            raise _Unread
        self.position += 1

    def sum(self) -> Fraction:
        value = self.signed()
        while self.peek()[1] in ("+", "-"):
            sign = self.peek()[1]
            self.position += 1
            right = self.product()
            value = _bounded(value + right if sign == "+" else value - right)
        return value

    def signed(self) -> Fraction:
        if self.peek()[1] not in ("+", "-"):
            return self.product()
        sign = -1 if self.peek()[1] == "-" else 1
        self.position += 1
        return sign * self.product()

    def product(self) -> Fraction:
        value = self.power()
        while self.peek()[0] in ("times", "over"):
            over = self.peek()[0] == "over"
            self.position += 1
            right = self.power()
            value = _bounded(value / right if over else value * right)
        return value

    def power(self) -> Fraction:
        base = self.atom()
        if self.peek()[1] != "^":
            return base
        self.position += 1
        exponent = self.exponent()
        if self.peek()[1] == "^":
            raise Rejected("tower")
        if exponent.denominator != 1:
            raise _Unread
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) > MAX_EXPONENT or size * abs(exponent) > MAX_BITS:
            raise Rejected("too_large")
        if base == 0 and exponent <= 0:
            raise _Unread
        return Fraction(base) ** int(exponent)

    def exponent(self) -> Fraction:
        kind, text = self.peek()
        if text == "{":
            return self.enclosed("{", "}")
        if text == "(":
            return self.enclosed("(", ")")
        if kind != "number" or len(text) != 1:  # TeX raises one character only: 10^12 is 10^1 2
            raise _Unread
        self.position += 1
        return Fraction(text)

    def atom(self) -> Fraction:
        kind, text = self.peek()
        if text == "(":
            return self.enclosed("(", ")")
        if text == "{":
            return self.enclosed("{", "}")
        self.position += 1
        if kind == "mixed":
            whole, top, bottom = text.replace("/", " ").split(" ")
            return _mixed(Fraction(whole), Fraction(int(top), int(bottom)))
        if kind == "frac":
            return self.fraction()
        if kind != "number":
            raise _Unread
        value = Fraction(text)
        if self.peek()[0] != "frac":
            return value
        self.position += 1
        return _mixed(value, self.fraction())

    def fraction(self) -> Fraction:
        top, bottom = self.argument(), self.argument()
        return top / bottom

    def argument(self) -> Fraction:
        kind, text = self.peek()
        if text == "{":
            return self.enclosed("{", "}")
        if kind != "number" or not text.isdigit() or len(text) > 2:
            raise _Unread
        # \frac12 is one half: without braces an argument is one digit.
        self.position += 1
        if len(text) == 2:
            self.position -= 1
            self.tokens[self.position] = ("number", text[1])
            return Fraction(text[0])
        return Fraction(text)

    def enclosed(self, opening: str, closing: str) -> Fraction:
        self.take(opening)
        value = self.sum()
        self.take(closing)
        return value


def _mixed(whole: Fraction, part: Fraction) -> Fraction:
    """Two and three fifths; what cannot be a mixed number is not read, because it might be a product."""
    if whole.denominator != 1 or whole == 0 or not 0 < part < 1:
        raise _Unread
    return whole + part


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * MAX_BITS:
        raise Rejected("too_large")
    return value
