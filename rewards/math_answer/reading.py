"""Normal forms read as values, completely or not at all."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from rewards.math_answer import expression, relations
from rewards.math_answer.normal import WORD_END, WORD_START
from rewards.math_answer.outcomes import Rejected, Unread
from rewards.math_answer.scalars import read_scalar
from rewards.math_answer.tokens import Token, tokenise
from rewards.math_answer.units import words
from rewards.math_answer.values import (
    LINE,
    MAX_ITEMS,
    Assignment,
    Based,
    Equation,
    Infinity,
    Matrix,
    Ordered,
    Piece,
    Ratio,
    RealSet,
    Scalar,
    Symbol,
    Text,
    Unordered,
    Value,
)

_BASED = re.compile(
    rf"\(?([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\)?_(?:(\d)|\{{\(?{WORD_START}?(\d+|[a-z]+){WORD_END}?\)?\}}|{WORD_START}([a-z]+){WORD_END})"
)
_IN_BASE = re.compile(rf"([0-9A-F]+) ?\(?{WORD_START}base{WORD_END} ?(\d+)\)?")
_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve"
_BASES = {name: base for base, name in enumerate(_BASE_NAMES.split(), 2)} | {"sixteen": 16}
_ARTICLES = words("a an the")
_REAL_LINE = frozenset({"all real numbers", "all reals", "all real", "real numbers", "reals"})
_SAME_WORDS = {"no solutions": "no solution", "dne": "does not exist"}
_MAX_LABEL = 3
_OPENING = ("(", "[", r"\{", "{", "lfloor", "lceil", "langle")
_CLOSING = (")", "]", r"\}", "}", "rfloor", "rceil", "rangle")
_BETWEEN_SETS = ("cup", "cap", "setminus", "in")
_SYSTEMS = ("cases", "aligned", "align", "gathered")
_MATRICES = ("matrix", "pmatrix", "bmatrix", "smallmatrix", "array")


def read(normal: str) -> Value:
    """The value of a normal form. Raises Unread or Rejected."""
    if based := _based(normal):
        return based
    return read_tokens(tokenise(normal))


def _based(normal: str) -> Based | Scalar | None:
    if said := _IN_BASE.fullmatch(normal):
        normal = f"{said[1]}_{{{said[2]}}}"
    match = _BASED.fullmatch(normal)
    if not match:
        return None
    name = match[2] or match[3] or match[4]
    base = int(name) if name.isdigit() and len(name) < 3 else _BASES.get(name, 0)
    digits = match[1].upper().lstrip("0") or "0"
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in digits if digit != "."):
        raise Unread
    return Based(digits, base) if base != 10 else Scalar(("num", Fraction(digits)))


def read_tokens(tokens: list[Token]) -> Value:
    if not tokens:
        raise Unread
    tokens = _unbraced(_french(tokens))
    if system := _system(tokens):
        return system
    if text := _text(tokens):
        return text
    if (told := _labelled(tokens) or _about(tokens)) is not None:
        return told
    items, joined = _listed(tokens)
    if len(items) == 1:
        tokens = items[0]
    else:
        return relations.joined([read_tokens(item) for item in items], joined)
    if any(token.text in relations.SIGNS and token.kind in ("op", "cmd") for token in tokens):
        relation = relations.read_relation(tokens, read_tokens)
        if relation is not None:
            return relation
    return (
        _union(tokens)
        or _enclosed(tokens)
        or _symbol(tokens)
        or _ratio(tokens)
        or _matrix(tokens)
        or read_scalar(tokens)
    )


def _labelled(tokens: list[Token]) -> Value | None:
    """Domain: (0, 1)."""
    at = next((index for index, token in enumerate(tokens) if token.kind != "word"), 0)
    if not at or tokens[at].text != ":" or len(tokens) == at + 1 or at > _MAX_LABEL:
        return None
    name = relations.name_of(tokens[:at])
    if name is None:
        raise Unread
    return Assignment(name, read_tokens(tokens[at + 1 :]))


def _about(tokens: list[Token]) -> Value | None:
    """An exact value, and after "about" the same one rounded; None where nothing is about another."""
    if not any(token.text == "approx" for token in tokens):
        return None
    sides, _ = split(tokens, "approx")
    if len(sides) != 2 or not all(sides):
        raise Unread
    exact, rounded = map(read_tokens, sides)
    value = exact.value if isinstance(exact, Assignment) else exact
    if not (isinstance(value, Scalar) and isinstance(rounded, Scalar) and rounded.decimals):
        raise Unread
    off = ("|", ("+", (value.node, ("-", rounded.node))))
    if not relations.below(off, Fraction(1, 2 * 10**rounded.decimals)):
        raise Unread
    return exact


def depths(tokens: list[Token]) -> list[int]:
    """How many brackets are open before each token; a half-open interval closes what another bracket opened."""
    found, depth = [], 0
    for token in tokens:
        closes = token.kind in ("op", "cmd") and token.text in _CLOSING
        opens = token.kind in ("op", "cmd") and token.text in _OPENING
        if closes or token.kind == "end":
            depth -= 1
        found.append(depth)
        if opens or token.kind == "begin":
            depth += 1
        if depth < 0:
            raise Unread
    if depth:
        raise Unread
    return found


def split(tokens: list[Token], *texts: str) -> tuple[list[list[Token]], list[str]]:
    """Cut at the operators outside all brackets; (parts, the operators between them)."""
    parts: list[list[Token]] = [[]]
    signs = []
    for token, depth in zip(tokens, depths(tokens), strict=True):
        text = token.text.casefold() if token.kind == "word" else token.text
        splits = text in ("and", "or") if token.kind == "word" else token.kind in ("op", "cmd")
        if depth == 0 and splits and text in texts:
            parts.append([])
            signs.append(text)
        else:
            parts[-1].append(token)
    return parts, signs


# Lists


def _listed(tokens: list[Token]) -> tuple[list[list[Token]], str]:
    """The items of a list without brackets, and the word that joins them: "and", "or" or ","."""
    signed = any(token.text in relations.SIGNS and token.kind in ("op", "cmd") for token in tokens)
    parts, signs = split(tokens, ",", ";", "and", "or", *(("vee", "wedge") if signed else ()))
    if len(parts) == 1:
        return parts, ""
    signs = [{"vee": "or"}.get(sign, sign) for sign in signs]
    words = {sign for sign in signs if sign not in (",", ";")}
    if len(words) > 1 or (";" in signs and set(signs) != {";"}):
        raise Unread
    # "a, b, and c" has an empty item between the comma and the word.
    items = [part for index, part in enumerate(parts) if part or index != len(parts) - 2]
    if not all(items):
        raise Unread
    if len(items) > MAX_ITEMS:
        raise Rejected("too_many_items")
    if len(items) == 2 and _any_integer(items[1], items[0]):
        return items[:1], ""
    return items, words.pop() if words else ","


def _any_integer(condition: list[Token], value: list[Token]) -> bool:
    """The k in Z behind a value with a k in it, which is left out as often."""
    said = [token.text for token in condition]
    return said[1:] == ["in", "mathbb", "{", "Z", "}"] and any(token.text == said[0] for token in value)


def _unbraced(tokens: list[Token]) -> list[Token]:
    """Without braces, which only group, around the whole."""
    while len(tokens) > 2 and tokens[0].text == "{" and tokens[-1].text == "}" and depths(tokens)[1:].count(0) == 1:
        inner = tokens[1:-1]
        if any(token.text == "over" for token in inner):
            break
        tokens = inner
    return tokens


def _enclosed(tokens: list[Token]) -> Value | None:
    """A tuple, an interval or a set: one pair of brackets around the whole, and a comma in it."""
    first, last = tokens[0].text, tokens[-1].text
    if first not in ("(", "[", r"\{", "langle") or last not in (")", "]", r"\}", "rangle"):
        return None
    if len(tokens) < 2 or depths(tokens)[1:].count(0) != 1:
        return None
    inner = tokens[1:-1]
    if first == r"\{" or last == r"\}":
        if first + last != r"\{\}":
            raise Unread
        if built := _built(inner):
            return built
        return (
            replace(relations.flat(list(map(read_tokens, _commas(inner)))), braced=True)
            if inner
            else Symbol("emptyset")
        )
    if not inner:
        raise Unread
    items = _commas(inner)
    if len(items) == 1:
        around_matrix = first + last == "[]" and inner[0].kind == "begin" and inner[-1].kind == "end"
        if first + last != "()" and not around_matrix:
            raise Unread
        return read_tokens(inner)
    if ("langle" in (first, last)) and first + last != "langlerangle":
        raise Unread
    return Ordered(first + last if first != "langle" else "<>", tuple(map(read_tokens, items)))


def _commas(tokens: list[Token]) -> list[list[Token]]:
    items, _ = split(tokens, ",")
    if len(items) == 1 and any(token.text == ";" for token in tokens):
        items, _ = split(tokens, ";")
        tokens = [token for item in items for token in item]
    if len(items) > MAX_ITEMS:
        raise Rejected("too_many_items")
    if any(token.text in ("and", "or", "mid", ":", ";", "colon") for token in tokens) or not all(items):
        raise Unread
    return items


# Sets of real numbers


def _french(tokens: list[Token]) -> list[Token]:
    """]1, 2[ as (1, 2)."""
    if tokens[0].text != "]" and not any(token.text in ("[", "]") for token in tokens[1:-1]) and tokens[-1].text != "[":
        return tokens
    found = []
    for index, token in enumerate(tokens):
        before, after = tokens[index - 1] if index else None, tokens[index + 1] if index + 1 < len(tokens) else None
        if token.kind == "op" and token.text == "]" and (before is None or before.text in _BETWEEN_SETS):
            token = replace(token, text="(")
        elif token.kind == "op" and token.text == "[" and (after is None or after.text in _BETWEEN_SETS):
            token = replace(token, text=")")
        found.append(token)
    return found


def _built(inner: list[Token]) -> Value | None:
    """The set of the x that an inequality leaves of the line; None where no condition is given."""
    at = next((index for index, token in enumerate(inner) if token.text in ("mid", ":", "|", "colon")), 0)
    if not at:
        return None
    element = [token.text for token in inner[:at]]
    value = read_tokens(inner[at + 1 :]) if inner[at + 1 :] else None
    if not isinstance(value, RealSet) or element not in ([value.variable], [value.variable, "in", "reals"]):
        raise Unread
    return replace(value, variable="")


def _union(tokens: list[Token]) -> Value | None:
    for index, token in enumerate(tokens[1:]):
        if token.text == r"\{" and tokens[index].text == "-":
            tokens = [*tokens[:index], Token("cmd", "setminus"), *tokens[index + 1 :]]
    parts, signs = split(tokens, "cup", "setminus")
    if len(parts) == 1:
        return None
    pieces: list[Piece] = []
    without: list[Scalar] = []
    for part, sign in zip(parts, ["cup", *signs], strict=True):
        value = read_tokens(part)
        if sign == "setminus":
            if not (isinstance(value, Unordered) and value.braced) or part is not parts[-1]:
                raise Unread
            without += [item for item in value.items if isinstance(item, Scalar)]
            if len(without) != len(value.items):
                raise Unread
        else:
            pieces += relations.pieces_of(value)
    return RealSet(tuple(pieces), tuple(without))


def _symbol(tokens: list[Token]) -> Value | None:
    if len(tokens) == 2 and tokens[1].text == "infty" and tokens[0].text in ("+", "-"):
        return Infinity(1 if tokens[0].text == "+" else -1)
    if len(tokens) > 1 or tokens[0].kind not in ("cmd", "op"):
        return None
    name = tokens[0].text
    if name == "infty":
        return Infinity(1)
    if name == "reals":
        return LINE
    return Symbol(name) if name in ("emptyset", "...") else None


# Ratios, matrices


def _ratio(tokens: list[Token]) -> Ratio | None:
    parts, _ = split(tokens, ":")
    if len(parts) == 1:
        return None
    values = [read_tokens(part) for part in parts]
    if not all(isinstance(value, Scalar) and not value.unit and not value.percent for value in values):
        raise Unread
    return Ratio(tuple(value for value in values if isinstance(value, Scalar)))


def _system(tokens: list[Token]) -> Value | None:
    """Equations below one another."""
    first, last = tokens[0], tokens[-1]
    if first.kind != "begin" or first.text not in _SYSTEMS or last.kind != "end" or last.text != first.text:
        return None
    inner = [token for token in tokens[1:-1] if token.text != "&"]
    rows, _ = split(inner, r"\\")
    rows = [row[:-1] if row and row[-1].text in (",", ";") else row for row in rows if row]
    values = [read_tokens(row) for row in rows]
    if not values or not all(isinstance(value, Assignment | Equation) for value in values):
        raise Unread
    return relations.joined(values, ",") if len(values) > 1 else values[0]


def _matrix(tokens: list[Token]) -> Matrix | None:
    at = next((index for index, token in enumerate(tokens) if token.kind == "begin"), None)
    if at is None:
        return None
    name, last = tokens[at].text, tokens[-1]
    if name not in _MATRICES or last.kind != "end" or last.text != name:
        raise Unread
    inner = tokens[at + 1 : -1]
    if any(token.kind in ("begin", "end") for token in inner):
        raise Unread
    if name == "array" and inner and inner[0].text == "{":
        inner = inner[next(i for i, token in enumerate(inner) if token.text == "}") + 1 :]
    rows, _ = split(inner, r"\\")
    if len(rows) > 1 and not rows[-1]:
        rows.pop()
    cells = [split(row, "&")[0] for row in rows]
    if len({len(row) for row in cells}) != 1 or sum(map(len, cells)) > MAX_ITEMS:
        raise Unread
    factor = tokens[:at]
    if factor and factor[-1].text == "*":
        factor = factor[:-1]
    scale = None
    if factor:
        scale = ("-", ("num", Fraction(1))) if [token.text for token in factor] == ["-"] else expression.parse(factor)
    return Matrix(tuple(tuple(read_tokens(cell) for cell in row) for row in cells), scale)


# Texts


def _text(tokens: list[Token]) -> Value | None:
    """Words only. A single letter of them is a variable, so that \\text{C} is C."""
    if not any(token.kind == "word" for token in tokens):
        return None
    if not all(token.kind == "word" or token.kind == "let" or token.text in ("'", "-") for token in tokens):
        return None
    if any(token.kind == "word" and token.text.casefold() in ("and", "or") for token in tokens):
        return None
    words = [token.text.casefold() if len(token.text) > 1 else token.text for token in tokens]
    words = [word for index, word in enumerate(words) if word not in _ARTICLES or len(words) == 1 or index]
    if len(words) == 1 and len(words[0]) == 1 and words[0].isascii() and words[0].isalpha():
        return Scalar(("const", words[0]) if words[0] in "ei" else ("var", words[0]))
    said = " ".join(words)
    return LINE if said in _REAL_LINE else Text(tuple(_SAME_WORDS.get(said, said).split(" ")))
