"""Roman numerals from 1 to 3999."""

from __future__ import annotations

_VALUES = {"M": 1000, "D": 500, "C": 100, "L": 50, "X": 10, "V": 5, "I": 1}
_STEPS = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"))
_SMALL_STEPS = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def write(number: int) -> str:
    if not 0 < number < 4000:
        raise ValueError(f"{number} is not between 1 and 3999")
    text = ""
    for value, numeral in _STEPS + _SMALL_STEPS:
        text += number // value * numeral
        number %= value
    return text


def parse(text: str) -> int:
    return sum(_VALUES[letter] for letter in text)
