"""Units, money and counted things behind a number."""

from __future__ import annotations

from fractions import Fraction


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SYNONYMS = {
    "m": "meter meters metre metres 米",
    "cm": "centimeter centimeters centimetre centimetres 厘米",
    "mm": "millimeter millimeters millimetre millimetres 毫米",
    "km": "kilometer kilometers kilometre kilometres 公里 千米",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards yds",
    "mi": "mile miles",
    "g": "gram grams 克",
    "kg": "kilogram kilograms kilo kilos kgs 千克 公斤",
    "mg": "milligram milligrams",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "l": "liter liters litre litres L 升",
    "ml": "milliliter milliliters millilitre millilitres mL 毫升",
    "s": "second seconds sec secs 秒",
    "min": "minute minutes mins 分钟",
    "h": "hour hours hr hrs 小时",
    "day": "days 天",
    "week": "weeks wk wks",
    "month": "months",
    "year": "years yr yrs 岁 年",
    "dollar": "dollars USD usd bucks",
    "cent": "cents",
    "euro": "euros EUR",
    "yuan": "元 yuan RMB CNY 块",
    "degree": "degrees deg",
    "radian": "radians rad",
    "unit": "units",
    "point": "points pts pt",
    "person": "people persons 人",
    "child": "children",
    "N": "newton newtons",
    "J": "joule joules",
    "W": "watt watts",
    "V": "volt volts",
    "Hz": "hertz",
    "mol": "mole moles",
    "sq": "square",
    "cu": "cubic",
}
_CANONICAL = {word: unit for unit, names in _SYNONYMS.items() for word in names.split()}
_ABBREVIATIONS = words(
    "cm mm km kg mg ml mL ft yd mi lb lbs oz hr hrs min mins sec secs mph kph mol Hz kHz kJ kWh rpm sq USD EUR RMB CNY "
    "pts deg rad ms"
)
SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "百": 10**2,
    "千": 10**3, "万": 10**4, "亿": 10**8,
}  # fmt: skip
REFUSED = words(
    "approximately approx about roughly or and not maybe perhaps possibly nearly almost least most more less than "
    "over under up to below above between from either neither but if is are was be plus minus times divided squared "
    "cubed factorial negative positive ago loss deficit down half quarter third thirds halves quarters dozen dozens "
    "score tens ones root power tenths pair pairs fewer extra short wrong incorrect fifths sixths sevenths eighths "
    "ninths tenth hundredth hundredths thousandths millionths halve exactly correct answer this the a an around only "
    "because since so hundreds thousands millions bc one two three four five six seven eight nine ten until except "
    "without any other another nor vs equals equal true false yes no sqrt pi infinity base mod remainder r 或 "
    "ish max maximum minimum 约 左右 大约 负 不"
)
"""Words behind which a number is another one, or only one of several."""
_LETTERS = frozenset("mgshlLNJWVAKCF")
"""Units of one letter; 5i is another number than 5."""
_COUNTER = 2
"""Characters of a counted thing in Chinese, Japanese and Korean; more may be a sentence."""
_ORDINALS = words("th st nd rd")
MAX_WORDS = 6


def is_unit(run: str) -> bool:
    """Whether bare letters behind a number are a unit rather than a product of variables."""
    return run in _ABBREVIATIONS


def unit_of(words: list[str]) -> str | None:
    """One spelling for the words behind a number, of which "/" and "^2" are some; None if they are no unit."""
    if not words or len(words) > MAX_WORDS:
        return None
    parts: list[str] = []
    for word in words:
        low = word.casefold()
        if (
            low in REFUSED
            or (len(word) > _COUNTER and word[0] >= "\u2e80")
            or (len(word) == 1 and word.isalpha() and word.isascii() and word not in _LETTERS)
        ):
            return None
        if low in ("per", "/", "每"):
            parts.append("/")
        elif low in _ORDINALS:
            parts.append("ordinal")
        else:
            parts.append(_canonical(word))
    while "sq" in parts or "cu" in parts:
        at = parts.index("sq") if "sq" in parts else parts.index("cu")
        if at + 1 == len(parts):
            return None
        parts[at : at + 2] = [parts[at + 1] + ("^2" if parts[at] == "sq" else "^3")]
    return " ".join(parts).replace(" ^", "^")


def _canonical(word: str) -> str:
    for spelling in (word, word.casefold()):
        if spelling in _SYNONYMS:
            return spelling
        if spelling in _CANONICAL:
            return _CANONICAL[spelling]
    low = word.casefold()
    return low[:-1] if len(low) > 3 and low.endswith("s") and not low.endswith("ss") else low


def scale_of(words: list[str]) -> tuple[Fraction, list[str]]:
    """The factor that leading words such as "million" stand for, and the words behind them."""
    factor = Fraction(1)
    while words and words[0].casefold() in SCALES:
        factor *= SCALES[words[0].casefold()]
        words = words[1:]
    return factor, words
