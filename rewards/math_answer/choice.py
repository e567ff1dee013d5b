"""Letters of a multiple choice."""

from __future__ import annotations

import re

from rewards.math_answer.normal import WORD_END, WORD_START

LETTERS = "ABCDEFGHIJ"
_WORD = re.compile(r"^(?:the\s*)?(?:option|choice|answer)\s*:?\s*", re.IGNORECASE)
_LEADING = re.compile(r"[(\[]([A-Za-z])[)\]]|([A-Za-z])(?:[.):]|$)")
_HEDGED = re.compile(
    r"(?<![A-Za-z])(?:or|not|no|maybe|either|neither|nor|never|vs|wrong|incorrect|false|eliminated|rejected|excluded|unlikely"
    r"|impossible|probably|possibly|perhaps|isn't|isn’t)(?![A-Za-z])|\?",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[,;/&()\s]|and", re.IGNORECASE)


def chosen(normal: str, letters: str, multi: bool) -> frozenset[str] | None:
    """The letters that an answer chooses; None where that is not plain: a hedge, or no letter at all."""
    text = re.sub(r"\s+", " ", normal.replace(WORD_START, " ").replace(WORD_END, " "))
    text = _WORD.sub("", re.sub(r"(?<=\() | (?=[).:])", "", text).strip())
    if multi:
        if re.search("[a-z]{2}", re.sub("and", "", text)):
            return None  # a word that is made of such letters
        found = _BETWEEN.sub("", text).upper()
        return frozenset(found) if found and set(found) <= set(letters) and len(set(found)) == len(found) else None
    match = _LEADING.match(text)
    if not match:
        return None
    letter, rest = (match[1] or match[2]).upper(), text[match.end() :]
    upper, lower = re.escape(letters), re.escape(letters.lower())
    others = re.search(rf"(?<![A-Za-z])(?:[{upper}]|[{lower}][).]|(?:and|&)\s*\(?[{lower}])(?![A-Za-z])", rest)
    return None if others or _HEDGED.search(rest) or letter not in letters else frozenset(letter)
