"""Normal forms cut into tokens."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from rewards.math_answer.normal import FUNCTIONS, WORD_END, WORD_START
from rewards.math_answer.outcomes import Rejected, Unread
from rewards.math_answer.units import is_unit, words

MAX_TOKENS = 700


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """"num", "let" (a variable), "fn", "word", "cmd" or "op"."""
    text: str
    spaced: bool = False
    """Whether a space stands before it."""
    value: Fraction | None = None


_EXPONENT = r"(?:[eE][+-]?\d+(?![A-Za-z0-9.]))?"
_NEXT = re.compile(
    rf"(?P<word>{WORD_START}[^{WORD_END}]*{WORD_END})"
    r"|(?P<repeating>\d*\.\d*(?:\\(?:overline|bar)(?:\{\d+\}|\d(?!\d))|\\dot\{?\d\}?(?:\d*\\dot\{?\d\}?)?)|\d*\.\(\d+\)(?![\w.(]))"
    rf"|(?P<num>(?:\d+(?:\.\d+)?|\.\d+){_EXPONENT})"
    r"|(?P<run>[^\W\d_]+)"
    r"|\\begin\{(?P<begin>[a-z]+\*?)\}(?:\[[a-z]\])?|\\end\{(?P<end>[a-z]+\*?)\}|(?P<reals>\\mathbb\{?R\}?|\\(?:R|reals)(?![A-Za-z]))"
    r"|\\(?P<cmd>[A-Za-z]+)|(?P<brace>\\[{}|])|(?P<row>\\\\)|(?P<percent>\\?%)|(?P<money>\\\$)"
    r"|(?P<op>\*\*|\.\.\.|:=|<=|>=|!=|[-+*/^_(){}\[\]|!=<>,;:&'])|(?P<space>\s+)"
)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?![\d])(?:\.\d+)?")
_GROUPS = re.compile(r"[1-9]\d{0,2}(?: \d{3})+(?![\d])(?:\.\d+)?")
_GREEK = words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_SAME = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=",
    "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "vert": "|", "lvert": "|",
    "rvert": "|",
    "lbrack": "[", "rbrack": "]", "lbrace": r"\{", "rbrace": r"\}", "dots": "...", "ldots": "...", "cdots": "...",
    "colon": ":", "backslash": "setminus", "varnothing": "emptyset", "degree": "circ", "infin": "infty",
    "land": "wedge",
    "lor": "vee", "lparen": "(", "rparen": ")", "mod": "bmod",
}  # fmt: skip
_MONEY = {"euro": "euro", "pounds": "sterling", "yen": "yen"}
_SHORT_WORDS = words(
    "and any all add ant art arm apt act no on or of if is to in an at so we by do it as be he me my up us go am"
)
_PRODUCT = re.compile(r"(?!.*(.).*\1)[a-z][b-df-hj-np-tv-z]{2,3}(?<![eiou]..)(?<![eiou]...)")
r"""Three or four letters that are variables rather than a word: xyz, abc."""
_NAMES = {"pi": "pi", "infinity": "infty", "inf": "infty", "infty": "infty", "sqrt": "sqrt"}


def tokenise(text: str) -> list[Token]:
    tokens: list[Token] = []
    position, depth, spaced = 0, 0, False
    while position < len(text):
        grouped = _grouped(text, position, depth)
        match = grouped or _NEXT.match(text, position)
        if match is None:
            raise Unread
        position = match.end()
        if grouped:
            value = Fraction(re.sub("[ ,]", "", match[0]))
            tokens.append(Token("num", match[0], spaced, value))
        elif match.lastgroup == "space":
            spaced = True
            continue
        else:
            tokens += _tokens(match, spaced, tokens)
            last = tokens[-1].text if tokens else ""
            depth += (last in ("(", "[", r"\{")) - (last in (")", "]", r"\}"))
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise Rejected("too_long")
    return tokens


def _grouped(text: str, position: int, depth: int) -> re.Match[str] | None:
    """A number with thousands apart, here; in brackets a comma separates items."""
    if not text[position].isdigit() or (position and text[position - 1] in "_^."):
        return None
    if position and text[position - 1].isdigit():
        return None
    return (_THOUSANDS.match(text, position) if depth == 0 else None) or _GROUPS.match(text, position)


def _tokens(match: re.Match[str], spaced: bool, before: list[Token]) -> list[Token]:
    kind, text = match.lastgroup, match[0]
    if kind == "num":
        return [Token("num", text, spaced, _number(text))]
    if kind == "repeating":
        return [Token("num", "repeating", spaced, _repeating(text))]
    if kind == "word":
        return [_word(text[1:-1], spaced)]
    if kind == "run":
        return _run(text, spaced, before)
    if kind == "cmd":
        return [_command(match["cmd"], spaced)]
    if kind in ("begin", "end"):
        return [Token(kind, match[kind], spaced)]
    if kind == "reals":
        return [Token("cmd", "reals", spaced)]
    if kind == "money":
        return [Token("money", "dollar", spaced)]
    return [
        Token("op", {"row": r"\\", "percent": "%"}.get(kind or "", {r"\|": "|", ":=": "="}.get(text, text)), spaced)
    ]


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 5 or (exponent and abs(int(exponent)) > 5000):
        raise Rejected("too_large")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _repeating(text: str) -> Fraction:
    start, digits = re.split(r"\\(?:overline|bar|dot)|(?=\()", text, maxsplit=1)
    digits = re.sub(r"\D|\\dot", "", digits)
    whole, _, decimals = start.partition(".")
    nines = 10 ** len(digits) - 1
    return Fraction(f"{whole or 0}.{decimals or 0}") + Fraction(int(digits), nines * 10 ** len(decimals))


def _word(run: str, spaced: bool) -> Token:
    if run.casefold() == "infinity":
        return Token("cmd", "infty", spaced)
    return Token("word", run, spaced)


def _run(run: str, spaced: bool, before: list[Token]) -> list[Token]:
    """Letters without a command: a function, a constant, a unit behind a number, a product of variables, or a word."""
    if run.casefold() in FUNCTIONS:
        return [Token("fn", run.casefold(), spaced)]
    if run.casefold() in _NAMES:
        return [Token("cmd", _NAMES[run.casefold()], spaced)]
    if len(run) == 1 and not run.isascii():
        name = unicodedata.name(run, "").split()
        if name[:1] == ["GREEK"] and len(name) == 4:
            return [_command(name[3].lower() if name[1] == "SMALL" else name[3].capitalize(), spaced)]
        return [Token("word", run, spaced)]
    if len(run) == 1:
        return [Token("let", run, spaced)]
    if before and before[-1].text not in ("=", "+", "-", "*", "/", "(") and is_unit(run):
        return [Token("word", run, spaced)]
    pair = len(run) == 2 and run.isascii() and run.islower()
    if (pair or _PRODUCT.fullmatch(run)) and run not in _SHORT_WORDS:
        return [Token("let", letter, spaced and not index) for index, letter in enumerate(run)]
    return [Token("word", run, spaced)]


def _command(name: str, spaced: bool) -> Token:
    if name in FUNCTIONS:
        return Token("fn", name, spaced)
    if name in _GREEK:
        return Token("let", name.removeprefix("var"), spaced)
    if name in _MONEY:
        return Token("money", _MONEY[name], spaced)
    if name in _SAME:
        same = _SAME[name]
        return Token("cmd" if same.isalpha() else "op", same, spaced)
    return Token("cmd", name, spaced)
