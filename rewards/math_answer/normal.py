"""Caps, and one spelling for what is written in many ways."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby

from rewards.math_answer.extraction import MAX_DEPTH
from rewards.math_answer.outcomes import Rejected
from rewards.math_answer.units import words

MAX_ANSWER_CHARS = 1000
MAX_DIGITS = 2000
WORD_START, WORD_END = "\ue000", "\ue001"
r"""Around every word that stood in `\text{...}`: private characters, which an answer itself may not hold."""
_DOLLAR = "\ue002"
FUNCTIONS = words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch "
    "ln log lg exp gcd lcm max min"
)


def normal_form(answer: str) -> str:
    """The normal form of an answer that is within the caps. Raises Rejected."""
    if len(answer) > MAX_ANSWER_CHARS:
        raise Rejected("too_long")
    if answer.isascii() and answer.isalnum():
        return answer
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
        "−": "-", "–": "-", "—": "-", "－": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
        "∙": r"\cdot ", "÷": r"\div ", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ",
        "∩": r"\cap ", "√": r"\surd ", "∛": r"\surd[3]", "∜": r"\surd[4]", "≤": r"\le ", "≥": r"\ge ",
        "⩽": r"\le ", "⩾": r"\ge ",
        "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
        "°": r"\degree ", "º": r"\degree ", "˚": r"\degree ", "∘": r"\circ ",
        "≈": r"\approx ", "∖": r"\setminus ", "∠": r"\angle ", "…": r"\ldots ", "⋯": r"\ldots ", "€": r"\euro ",
        "£": r"\pounds ", "¥": r"\yen ", "（": "(", "）": ")", "，": ", ", "、": ", ", "．": ".", "％": r"\%",
        "＝": "=",
        "＋": "+", "／": "/", "：": ":", "［": "[", "］": "]",
        "\u200b": None, "\u200c": None, "\u200d": None, "\u2060": None, "\ufeff": None, "\u00ad": None,
        "\u200e": None, "\u200f": None,
    }
)  # fmt: skip
_SPACING = re.compile(r"\\(?:[,;:> ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|~|\s")
_STYLE = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|large|Large|LARGE|huge|Huge|small|normalsize"
    r"|bf|rm|it|limits|nolimits|strut)(?![A-Za-z])|\\(?:color|textcolor)\s*\{\s*[a-zA-Z0-9!]*\s*\}"
)
_WRAPPER = re.compile(
    r"\\(text|textbf|textit|textrm|textsf|texttt|mbox|hbox|textnormal|underline|emph|mathrm|mathbf|mathit|mathsf|operatorname\*?"
    r"|boldsymbol|bm|mathord|ensuremath|phantom)\s*\{([^{}]*)\}"
)
_WORDS = ("text", "mbox", "hbox", "emph", "underline")
_PIECE = re.compile(rf"{WORD_START}[^{WORD_END}]*{WORD_END}|(\\?)([^\W\d_]+(?:['’-][^\W\d_]+)*)|.", re.DOTALL)
_AROUND_MATHS = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathrm|mathit|mathsf|mathord|ensuremath)\s*(?=\{)")
_MATHS_IN_TEXT = re.compile(r"\\(?:text|mbox|hbox)\s*\{\s*\$([^$]*)\$\s*\}")
_SPACE_OF = re.compile(r"\\[hv]space\*?\s*\{[^{}]*\}")
_FRACTION = re.compile(r"\\(?:[dtcsx]|nice)frac(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![\d.,}])[1-9]\d{0,2}(?:\{,\}\d{3})+(?!\d|\{,\})")
_BINOMIAL = re.compile(r"\\[dt]binom(?![A-Za-z])")
_LABEL = re.compile(
    "^"
    + "".join(rf"(?:{WORD_START}?{word}{WORD_END}?\s*)?" for word in ("the", "final"))
    + rf"{WORD_START}?answer{WORD_END}?\s*(?:{WORD_START}is{WORD_END}\s*:?|is(?![a-z])\s*:?|:)\s*",
    re.IGNORECASE,
)


def normalise(answer: str) -> str:
    """One spelling, without changing the value and without gluing digits."""
    if not answer.isascii():
        answer = "".join(_composed(unicodedata.normalize("NFC", answer).translate(_LETTERS)))
        answer = unicodedata.normalize("NFKC", answer)
        answer = "".join(str(unicodedata.decimal(letter, letter)) for letter in answer)
    # Of other digits it is a decimal comma, as it is written in much of Europe.
    if "{,}" in answer:
        answer = _THOUSANDS.sub(lambda found: found[0].replace("{,}", ""), answer)
    answer = answer.replace(r"\textdollar", r"\$").replace(r"\$", _DOLLAR)
    # \\[2pt] ends a row; it is no opening of a display.
    answer = re.sub(r"\\\\\s*\[[^\]]*pt\]", r"\\\\ ", answer)
    if "{" in answer:
        answer = _SPACE_OF.sub(" ", _MATHS_IN_TEXT.sub(r"{\1}", answer))
    if "U" in answer:
        answer = re.sub(r"(?<=[\])]) ?U ?(?=[\[(])", r"\\cup ", answer)
    answer = re.sub(r"\$|(?<!\\)\\[()\[\]]", " ", answer).replace(_DOLLAR, r"\$")
    answer = re.sub(r"(?<=\d,)\\!\s*(?=\d)|\\!", "", answer)
    if "~" in answer:
        answer = re.sub(r"(^|=)\s*~", r"\1\\sim ", answer)  # "about", where it can't be a space
    answer = _STYLE.sub(" ", answer)
    answer = re.sub(r"(?<!\\)\\[,;:> ]|~", " ", answer)
    for _ in range(4):
        unwrapped = _WRAPPER.sub(_unwrap, answer)
        if unwrapped == answer:
            break
        answer = unwrapped
    answer = _AROUND_MATHS.sub(" ", answer)
    answer = _SPACING.sub(_space, answer)
    answer = _BINOMIAL.sub(r"\\binom", _FRACTION.sub(r"\\frac", answer))
    answer = re.sub(r"\s+", " ", answer).strip()
    answer = re.sub(r"(?<!\.)[.。]$", "", _LABEL.sub("", answer)).strip()
    # A space matters between two letters or digits ("7 3" is not 73) and behind a comma ("48, 750" is a list).
    answer = re.sub(r"(?<![A-Za-z0-9,.]) | (?![A-Za-z0-9.])|(?<=,) (?![^ ])", "", answer)
    return re.sub(r"([\^_])\{([A-Za-z0-9])\}(?![A-Za-z0-9])", r"\1\2", answer)


def _composed(answer: str) -> Iterator[str]:
    """What stands for several characters, so that nothing is glued to its neighbours: 2⅞ is not 27/8, nor x² x2."""
    for tag, run in groupby(_characters(answer), lambda piece: piece[0]):
        text = "".join(character for _, character in run)
        if tag == "<super>":
            yield "^{" + text.replace("−", "-") + "}"
        elif tag == "<sub>":
            yield "_{" + text.replace("−", "-") + "}"
        elif tag == "<circle>":
            yield f" {text} "
        else:
            yield text


def _characters(answer: str) -> Iterator[tuple[str, str]]:
    for letter in answer:
        tag, *codes = unicodedata.decomposition(letter).split() or [""]
        text = "".join(chr(int(code, 16)) for code in codes) if tag.startswith("<") else letter
        if tag == "<square>":
            yield from _characters(text)
        elif tag == "<fraction>" and not text.endswith("⁄"):
            top, _, bottom = text.partition("⁄")
            yield "", rf"\frac{{{top}}}{{{bottom}}}"
        else:
            yield (tag, text) if tag in ("<super>", "<sub>", "<circle>") else ("", letter)


def _space(found: re.Match[str]) -> str:
    # "\\," is a row end and a comma, not a space.
    return found[0] if found.start() and found.string[found.start() - 1] == "\\" and len(found[0]) > 1 else " "


def _unwrap(found: re.Match[str]) -> str:
    command, content = found[1], found[2]
    if command == "phantom":
        return " "
    prose = command.startswith(_WORDS) and content.strip() not in ("gcd", "lcm")
    content = re.sub(r"\b(sq|cu)\.", r"\1", content)

    def mark(piece: re.Match[str]) -> str:
        backslash, run = piece[1], piece[2]
        if run is None or backslash:
            return piece[0]
        if run in FUNCTIONS and not prose:
            return rf"\{run} "
        return run if len(run) == 1 and not prose else f"{WORD_START}{run}{WORD_END}"

    return " " + _PIECE.sub(mark, content) + " "


def same_text(answer: str, gold: str) -> bool:
    """Whether two normal forms are the same but for spaces that carry no meaning."""
    if answer == gold:
        return True
    squeezed = answer.replace(", ", ",")
    return squeezed == gold.replace(", ", ",") and not re.search(r"\d,\d{3}(?!\d)", squeezed)
