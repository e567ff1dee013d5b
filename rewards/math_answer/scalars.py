"""Numbers and expressions, with the money, the unit or the percent sign beside them."""

from __future__ import annotations

import re
from dataclasses import replace

from rewards.math_answer import expression, relations
from rewards.math_answer.outcomes import Unread
from rewards.math_answer.tokens import Token
from rewards.math_answer.units import is_ordinal, scale_of, unit_of
from rewards.math_answer.values import Scalar, Value


def read_scalar(tokens: list[Token]) -> Value:
    bare = tokens[0].text if len(tokens) == 1 and tokens[0].text.isdigit() else ""
    tokens, money = _without_money(tokens)
    tokens, words, percent = _without_unit(_with_words(tokens))
    factor, words = scale_of(words)
    node = expression.parse(tokens)
    unit = unit_of(words) if words else None
    if (words and unit is None) or (money and unit not in (None, money)):
        raise Unread
    if factor != 1:
        node = ("*", (node, ("num", factor)))
    unit = money or unit
    if unit in (None, "celsius", "fahrenheit"):
        if node[0] == "deg":
            node, unit = node[1], f"degree {unit or ''}".rstrip()
        elif node[0] == "-" and node[1][0] == "deg":
            node, unit = ("-", node[1][1]), f"degree {unit or ''}".rstrip()
    return relations.expanded(Scalar(node, unit, percent, bare, _decimals(tokens)))


def _decimals(number: list[Token]) -> int:
    plain = number[1:] if number and number[0].text in ("-", "+") else number
    return (
        len(plain[0].text.partition(".")[2]) if len(plain) == 1 and re.fullmatch(r"[\d, ]*\.\d+", plain[0].text) else 0
    )


def _without_money(tokens: list[Token]) -> tuple[list[Token], str | None]:
    """$18.50, -$75, $-75, 18.50$."""
    at = [index for index, token in enumerate(tokens) if token.kind == "money"]
    if not at:
        return tokens, None
    if len(at) > 1 or at[0] not in (0, len(tokens) - 1, *([1] if tokens[0].text in ("-", "+") else [])):
        raise Unread
    return tokens[: at[0]] + tokens[at[0] + 1 :], tokens[at[0]].text


def _with_words(tokens: list[Token]) -> list[Token]:
    """The C of 20 degrees C as a word, and the th that is raised."""
    if [token.text for token in tokens[-4:-2]] == ["^", "{"] and tokens[-1].text == "}" and is_ordinal(tokens[-2].text):
        return [*tokens[:-4], tokens[-2]]
    last = tokens[-1] if tokens else None
    if last and last.kind == "let" and last.text in ("C", "F"):
        before = [token.text for token in tokens[-4:-1]]
        if before[-1:] == ["circ"] or before[-2:] == ["circ", "}"]:
            return [*tokens[:-1], replace(last, kind="word")]
    return tokens


def _without_unit(tokens: list[Token]) -> tuple[list[Token], list[str], bool]:
    """(the number, the words behind it, whether it is a percentage)."""
    if tokens and tokens[-1].text == "%" and tokens[-1].kind == "op":
        return tokens[:-1], [], True
    start = next((index for index, token in enumerate(tokens) if token.kind == "word"), len(tokens))
    words = _unit_words(tokens[start:])
    if [word.casefold() for word in words] in (["percent"], ["per", "cent"], ["percentage"], ["pct"]):
        return tokens[:start], [], True
    return tokens[:start], words, False


_POWERS = {"2": ["square"], "3": ["cubic"], "-1": ["/"], "-2": ["/", "square"], "-3": ["/", "cubic"]}


def _exponent(tokens: list[Token]) -> tuple[str, list[Token]]:
    """(what is raised, what stands behind it)."""
    texts = [token.text for token in tokens]
    if texts[0] == "{" and "}" in texts:
        end = texts.index("}")
        return "".join(texts[1:end]), tokens[end + 1 :]
    return texts[0], tokens[1:]


def _unit_words(tokens: list[Token]) -> list[str]:
    words: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token.kind == "word" or token.text in ("/", "*") or (token.kind == "let" and words):
            if token.text != "*":
                words.append(token.text)
        elif token.text == "^" and words and rest:
            power, rest = _exponent(rest)
            if power not in _POWERS or (power.startswith("-") and words[-2:-1] == ["/"]):
                raise Unread
            words[-1:] = [*_POWERS[power], words[-1]]
        else:
            raise Unread
    return words
