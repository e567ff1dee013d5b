"""Whether the final answer in a text is the gold answer. Exact, without executing anything, and fail closed.

What both sides say is read completely, as rational numbers and simple collections of them, or their normalised texts
are the same, or the answer is not accepted: everything else is `undecided`, which is not correct.
"""

from __future__ import annotations

import re
import time
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from rewards.math_value import Collection, Rejected, Value, read_value

MAX_ANSWER_CHARS = 1000
MAX_DEPTH = 40
MAX_DIGITS = 2000
_WINDOW = 20_000
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verdict. `reason` is for records: it may tell about the gold answer, so the model never reads it."""

    correct: bool
    reason: str
    """`equal:*`, `different:*`, `no_answer:*`, `rejected:*`, `undecided` or `gold_invalid`."""
    extracted: str | None
    """The answer as it was found, at most 200 characters."""
    path: str
    """What decided: "extraction", "caps", "text", "fraction" or "none"."""
    ms: float

    @property
    def scored(self) -> bool:
        """False where the gold answer is unusable: never to be read as reward 0."""
        return self.reason != "gold_invalid"


class _NoAnswer(Exception):
    """The text gives no answer; the message is the reason."""


def verify(text: str, gold: str, *, anchors: bool = True) -> Verdict:
    r"""Judges the last answer of one assistant message.

    Args:
        text: Only the final message: no tool output, no earlier turns.
        gold: The right answer, with or without dollar signs or a box around it.
        anchors: Whether "The answer is ..." counts where there is no box; training should say no.

    >>> verify(r"so \boxed{\frac{1}{2}}", "0.5").correct
    True
    """
    started = time.perf_counter()
    answer: str | None = None
    try:
        wanted = _gold(gold)
        try:
            answer = extract(text, anchors=anchors)
            correct, reason, path = _compare(_capped(answer), wanted)
        except _NoAnswer as problem:
            correct, reason, path = False, f"no_answer:{problem}", "extraction"
        except Rejected as problem:
            correct, reason, path = False, f"rejected:{problem}", "caps"
    except (_NoAnswer, Rejected):
        correct, reason, path = False, "gold_invalid", "none"
    shown = None if answer is None else answer[:_SHOWN]
    return Verdict(correct, reason, shown, path, 1000 * (time.perf_counter() - started))


# Finding the answer


def extract(text: str, *, anchors: bool = True) -> str:
    r"""The last answer of `text`: the last `\boxed` or `\fbox`, boxes side by side as a list, else an explicit anchor.

    Never an earlier box than the last, never "the last number". Raises `_NoAnswer`.
    """
    closing = text.rfind("</think>")
    said = text[closing + len("</think>") :] if closing >= 0 else text
    if "<think>" in said:
        raise _NoAnswer("open_thinking")
    said = said[-_WINDOW:]
    boxes = _boxes(said)
    if boxes:
        return _last_boxes(said, boxes)
    if not anchors:
        raise _NoAnswer("no_box")
    return _anchored(said)


_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_BETWEEN_BOXES = re.compile(r"(?:[\s,;$.]|\\[,; ]|and|or|\\text\{\s*(?:and|or)\s*\})*")


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every outermost box; content "" and end -1 for one that is not closed."""
    found = []
    position = 0
    while match := _BOX.search(text, position):
        end = _closing_brace(text, match.end())
        if end < 0:
            found.append((match.start(), -1, ""))
            position = match.end()
        else:
            found.append((match.start(), end + 1, text[match.end() + 1 : end]))
            position = end + 1
    return found


def _closing_brace(text: str, start: int) -> int:
    if start >= len(text) or text[start] != "{":
        return -1
    depth, position = 0, start
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 1
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return -1


def _last_boxes(text: str, boxes: list[tuple[int, int, str]]) -> str:
    if boxes[-1][1] < 0:
        raise _NoAnswer("unclosed_box")
    row = [_unboxed(boxes[-1][2])]
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[end:start] if end >= 0 else None
        if between is None or len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
            break
        row.insert(0, _unboxed(content))
    distinct = list(dict.fromkeys(row))
    return distinct[0] if len(distinct) == 1 else ", ".join(f"{{{item}}}" for item in distinct)


def _unboxed(content: str) -> str:
    content = content.strip()
    for _ in range(MAX_DEPTH):
        inner = _boxes(content)
        if not inner:
            break
        if len(inner) > 1 or inner[0][0] != 0 or inner[0][1] != len(content):
            raise _NoAnswer("mixed_box")
        content = inner[0][2].strip()
    if not content:
        raise _NoAnswer("empty_box")
    return content


_ANCHOR = re.compile(
    r"<answer>(?P<tag>[^<>\n]*)</answer>|####(?P<hashes>[^\n]*)"
    r"|(?:(?:final|correct)\s+answer|the\s+answer|\banswer\s*(?=:)|答案|最终答案|ответ|respuesta(?:\s+final)?"
    r"|réponse(?:\s+finale)?|antwort)(?:\*\*)?\s*(?:is|es|est|ist|是|为|為)?\s*[:：=]?(?P<words>[^\n]*)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:not|never|either|neither|between|about|around|approximately|roughly|or|maybe|perhaps|could|might)\b|[?≈~]",
    re.IGNORECASE,
)


def _anchored(text: str) -> str:
    found = list(_ANCHOR.finditer(text))
    if not found:
        raise _NoAnswer("no_box")
    last = found[-1]
    answer = next(group for group in (last["tag"], last["hashes"], last["words"]) if group is not None)
    answer = answer.strip().strip("*").strip().rstrip(".。").strip()
    if not answer:
        raise _NoAnswer("empty_anchor")
    if _HEDGE.search(answer):
        raise _NoAnswer("hedged")
    return answer


# Normal form


def _gold(gold: str) -> str:
    boxes = _boxes(gold[:_WINDOW])
    if boxes:
        gold = _last_boxes(gold, boxes)
    elif "####" in gold:
        gold = gold.rpartition("####")[2]
    normal = _capped(gold)
    if not normal or re.search(r"/\s*0+(?![\d.])", normal):
        raise _NoAnswer("gold")
    return normal


def _capped(answer: str) -> str:
    """The normal form, within the caps. Raises Rejected."""
    if len(answer) > MAX_ANSWER_CHARS:
        raise Rejected("too_long")
    if sum(letter.isdigit() for letter in answer) > MAX_DIGITS:
        raise Rejected("too_many_digits")
    if any(unicodedata.category(letter) in ("Cc", "Cs", "Co", "Cn") and letter not in "\n\t\r" for letter in answer):
        raise Rejected("control_characters")
    depth = deepest = 0
    for letter in answer:
        depth += (letter in "{([") - (letter in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise Rejected("too_deep")
    return normalise(answer)


_LETTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ",
        "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ",
        "（": "(", "）": ")", "，": ",", "．": ".", "％": r"\%", "＝": "=", "＋": "+", "／": "/",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "\u200b": None, "\u200c": None, "\u200d": None, "\u2060": None, "\ufeff": None, "\u00ad": None,
    }
)  # fmt: skip
_SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_SPACING = re.compile(r"\\(?:[,;:!> ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|~|\s")
_SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|large|Large|LARGE|small|normalsize)(?![A-Za-z])"
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boldsymbol)\s*\{([^{}]*)\}"
)


def normalise(answer: str) -> str:
    """One spelling for what is written in many ways, without changing the value and without gluing digits."""
    answer = answer.translate(_LETTERS)
    answer = _SUPERSCRIPT.sub(lambda found: "^{" + found[0].translate(_RAISED) + "}", answer)
    answer = "".join(str(unicodedata.decimal(letter, letter)) for letter in answer)
    answer = answer.replace("{,}", ",").replace(r"\$", "§")
    answer = re.sub(r"\$|\\[()\[\]]", " ", answer).replace("§", r"\$")
    answer = re.sub(r"\\!", "", answer)
    answer = _SPACING.sub(" ", _SIZES.sub(" ", answer))
    for _ in range(3):
        answer = _WRAPPER.sub(r" \1 ", answer)
    answer = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", answer)
    answer = re.sub(r"\s+", " ", answer).strip().rstrip(".").strip()
    # A space matters only between two letters or digits: "7 3" is not 73.
    answer = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", answer)
    return re.sub(r"([\^_])\{([A-Za-z0-9])\}(?![A-Za-z0-9])", r"\1\2", answer)


# Comparing


_CHOICE = re.compile(r"\(?([A-J])\)?")


def _compare(answer: str, gold: str) -> tuple[bool, str, str]:
    """(correct, reason, path) of two normal forms. Raises Rejected where a value is too large to be worked out."""
    if not answer:
        return False, "no_answer:empty", "extraction"
    if answer == gold:
        return True, "equal:text", "text"
    choice, wanted = _CHOICE.fullmatch(answer), _CHOICE.fullmatch(gold)
    if choice and wanted:
        same = choice[1] == wanted[1]
        return same, "equal:choice" if same else "different:choice", "text"
    value, right = _read(answer, gold)
    if value is None or right is None:
        return False, "undecided", "none"
    if isinstance(value, Fraction) and isinstance(right, Fraction):
        kind, same = "num", value == right
    elif isinstance(value, Collection) and isinstance(right, Collection):
        kind, same = "collection", value.same(right)
    else:
        kind, same = "type", False
    return same, f"{'equal' if same else 'different'}:{kind}", "fraction"


def _read(answer: str, gold: str) -> tuple[Value | None, Value | None]:
    """Both values; None for what is not read. "x = 13" is read as 13 beside a gold 13, never beside "y = 13"."""
    given, wanted = _link(answer), _link(gold)
    if given is None or wanted is None or (given[0] and wanted[0] and given[0] != wanted[0]):
        return None, None
    if wanted[0] and not given[0] and isinstance(given[1], Collection):
        return None, None
    return given[1], wanted[1]


def _link(text: str) -> tuple[str, Value] | None:
    """(name, value) of "value", "name = value" or a chain of equal values; None where a part is unread or differs."""
    parts = [part.strip() for part in text.split("=")]
    name = ""
    if len(parts) > 1 and re.fullmatch(r"[A-Za-z]", parts[0]):
        name = parts.pop(0)
    values = [read_value(part) for part in parts]
    first = values[0]
    if first is None or any(value is None or value != first for value in values):
        return None
    return name, first
