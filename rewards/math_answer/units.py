"""Units, money and counted things behind a number."""

from __future__ import annotations

import re
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
    "celsius": "Celsius C",
    "fahrenheit": "Fahrenheit F",
    "kelvin": "kelvins K",
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
    "pts pct deg rad ms"
)
SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "百": 10**2,
    "千": 10**3, "万": 10**4, "亿": 10**8, "萬": 10**4, "億": 10**8, "만": 10**4, "억": 10**8,
    "quadrillion": 10**15, "quintillion": 10**18, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
REFUSED = words(
    "approximately approx about roughly or and not maybe perhaps possibly nearly almost least most more less than "
    "over under up to below above between from either neither but if is are was be plus minus times divided squared "
    "cubed factorial negative positive ago loss deficit down half quarter third thirds halves quarters dozen dozens "
    "score tens ones root power tenths pair pairs fewer extra short wrong incorrect fifths sixths sevenths eighths "
    "ninths tenth hundredth hundredths thousandths millionths halve exactly correct answer this the a an around only "
    "because since so hundreds thousands millions bc one two three four five six seven eight nine ten until except "
    "without any other another nor vs equals equal true false yes no sqrt pi infinity base mod remainder r 或 "
    "ish max maximum minimum min. bound bounds fails lakhs crores gross googol mille mil billions trillions permille "
    "guess guesses wins circa ca environ etwa cerca casi quasi presque aprox mindestens falsch nicht moins menos "
    "maybes excluded included rejected doubled tripled halved squared rounded estimated undefined always impossible "
    "fewer tops invalid"
)
"""Words behind which a number is another one, or only one of several."""
_LETTERS = frozenset("mgshlLNJWVAKCF")
"""Units of one letter; 5i is another number than 5."""
_COUNTERS = words(
    "个 個 個人 个人 名 位 只 隻 头 頭 匹 条 條 张 張 本 枚 支 枝 根 颗 粒 件 台 辆 輛 棵 座 间 間 层 層 次 回 种 種 "
    "種類 类 组 組 页 頁 题 題 步 周 週 日 月 時間 週間 倍 度 平方米 平方厘米 平方千米 立方米 立方厘米 通り 歳 歲 つ "
    "円 圆 塊 点 點 箱 袋 瓶 杯 朵 排 "
    "개 명 원 가지 권 마리 번 살 세 시간 분 초 일 년 월 주 도 배 점 장 대 자루 송이 그루 미터 센티미터 킬로미터"
)
"""Of counted things in Chinese, Japanese and Korean; other signs behind a number may make another one of it."""
_THINGS = words(
    "women men mice sheep fish deer dice geese teeth oxen cup teaspoon tablespoon pint quart gallon acre pizza pie "
    "cake loaf bottle glass piece slice apple orange egg cookie ball card coin marble book page pencil box bag "
    "basket ticket student man woman boy girl team car train ship house room floor table chair tree flower dog cat "
    "bird cow horse way solution root value factor digit term vertex edge face side triangle circle angle line "
    "segment set subset function permutation combination arrangement outcome game match trip lap step shelf row "
    "column"
)
_BEHIND = words(
    "of in to for with on per at old each apart long wide tall high deep thick total altogether away remaining"
)
_EVERY = words("daily weekly monthly yearly hourly quarterly family")
_ORDINALS = words("th st nd rd")
MAX_WORDS = 6


def is_unit(run: str) -> bool:
    """Whether bare letters behind a number are a unit rather than a product of variables."""
    return run in _ABBREVIATIONS


def unit_of(words: list[str]) -> str | None:
    """One spelling for the words behind a number, of which "/" and "^2" are some; None if they are no unit.

    There has to be a unit among them, or a thing that is counted, with little behind it: "7 presumably" is no number of
    things, and "7 dollars off" another number of dollars.
    """
    if not words or len(words) > MAX_WORDS:
        return None
    counted = [index for index, word in enumerate(words) if _counted(word)]
    behind = words[counted[-1] + 1 :] if counted else words
    if behind and behind[0].casefold() not in _BEHIND:
        return None
    parts: list[str] = []
    for word in words:
        low = word.casefold()
        if (
            low in REFUSED
            or (low in SCALES or re.search("illi?on|illiard", low))
            or (low.endswith("ly") and low not in _EVERY)
            or not (word.isascii() or _known(word))
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


def is_ordinal(word: str) -> bool:
    return word in _ORDINALS


def _known(word: str) -> bool:
    return any(spelling in _SYNONYMS or spelling in _CANONICAL for spelling in (word, word.casefold())) or (
        word in _COUNTERS or word in _ABBREVIATIONS or word in _LETTERS or word.casefold() in _ORDINALS
    )


def _counted(word: str) -> bool:
    """Whether it is a unit or a thing, in the plural or well known."""
    low = word.casefold()
    plural = low.endswith("s") and not low.endswith(("ss", "us", "is")) and len(low) > 3
    return _known(word) or plural or low in _THINGS


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
    while words:
        name = words[0].casefold()
        scale = next(
            (scale for scale in (name, name[:1]) if scale in SCALES and (scale == name or not name.isascii())), ""
        )
        if not scale:
            break
        factor *= SCALES[scale]
        words = ([name[1:]] if scale != name else []) + words[1:]
    return factor, words
