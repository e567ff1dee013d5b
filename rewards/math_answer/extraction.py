"""Finding the final answer in one assistant message."""

from __future__ import annotations

import re

from rewards.math_answer.outcomes import NoAnswer

WINDOW = 20_000
"""Characters at the end of a message that are searched."""
MAX_DEPTH = 40
_BARE = 100

_THINKING = r"(?:think|thinking|thought|reasoning)"
_THINKING_TAG = re.compile(rf"<(/?){_THINKING}>")


def extract(text: str, *, anchors: bool = True) -> str:
    r"""The last answer of `text`: the last `\boxed` or `\fbox`, boxes side by side as a list, else an explicit anchor.

    Never an earlier box than the last, never "the last number". Only what follows the thinking counts. Raises NoAnswer.
    """
    said = _after_thinking(text)[-WINDOW:]
    boxes = find_boxes(said)
    if boxes:
        return last_boxes(said, boxes)
    if not anchors:
        raise NoAnswer("no_box")
    return _anchored(said)


def _after_thinking(text: str) -> str:
    start, is_open = 0, False
    for tag in _THINKING_TAG.finditer(text):
        is_open = not tag[1]
        if tag[1]:
            start = tag.end()
    if is_open:
        raise NoAnswer("open_thinking")
    return text[start:]


# Boxes


_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_BETWEEN_BOXES = re.compile(r"(?:[\s,;$.&]|\\[,; \\]|and|or|y|und|et|和|或|\\text\{\s*(?:and|or)\s*\})*")
_JOINED_BOXES = re.compile(
    r"[\s$]*(?:[-+*/=<>:~–—×·]|\\(?:cdot|times|pm|to|le|leq|ge|geq|ne|neq|approx|div|cup|cap|circ)|to|bis|à)[\s$]*"
)
_NEAR = 40


def find_boxes(text: str) -> list[tuple[int, int, str]]:
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


def last_boxes(text: str, boxes: list[tuple[int, int, str]]) -> str:
    """The content of the last box, or those of the boxes side by side with it, as a list."""
    if boxes[-1][1] < 0:
        raise NoAnswer("unclosed_box")
    row = [_unboxed(boxes[-1][2])]
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[end:start] if end >= 0 else None
        if between is None or len(between) > _NEAR or not _BETWEEN_BOXES.fullmatch(between):
            if between is not None and _JOINED_BOXES.fullmatch(between):
                raise NoAnswer("joined_boxes")
            break
        row.insert(0, _unboxed(content))
    distinct = list(dict.fromkeys(row))
    return distinct[0] if len(distinct) == 1 else ", ".join(f"{{{item}}}" for item in distinct)


def _unboxed(content: str) -> str:
    content = content.strip()
    for _ in range(MAX_DEPTH):
        inner = find_boxes(content)
        if not inner:
            break
        if len(inner) > 1 or inner[0][0] != 0 or inner[0][1] != len(content):
            raise NoAnswer("mixed_box")
        content = inner[0][2].strip()
    if not content:
        raise NoAnswer("empty_box")
    return content


# Anchors: "The answer is ..." in several languages


_ANCHOR = re.compile(
    r"<answer>(?P<tag>[^<>]{0,1000})</answer>|####(?P<hashes>[^\n]*)|(?:"
    r"final\s+answer|correct\s+answer|the\s+answer|\banswer\s*(?=[:*=])|最终答案|答案|答え|答(?=[:：])|정답|(?<!\w)답(?=[:은])"
    r"|ответ|respuesta(?:\s+final)?|réponse(?:\s+finale)?|antwort|lösung\s*(?=:)|ergebnis\s*(?=:)|risposta|resposta"
    r"|đáp\s+(?:án|số)|cevap|odpowied[źz]|उत्तर|الجواب|الإجابة"
    r")(?:\*\*)?\s*(?:(?:is|es|est|ist|lautet|è|é|jest|là)(?!\w)|是|为|為|は|은|는)?\s*(?:\*\*)?\s*[:：=]?\s*"
    r"(?P<words>[^\n]*)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:not|never|either|neither|between|about|around|approximately|approx|roughly|or|maybe|perhaps|could|might|but"
    r"|probably|possibly|unless|one of|cannot|unknown)\b|n't\b"
    r"|[?≈~]|\\approx|可能|或|不是|之间|左右|大约|约|아니|아닙|또는|ではない|ではあり|じゃない|または",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",?\s+(?:since|because|as|which|where|so|when|after|by|porque|weil|car)\s.*|[.。!]\s+\S.*|。.*")
_ENDING = re.compile(r"\s*(?:입니다|이다|です|である|だ)$")
_PROSE = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{2,}")


def _anchored(text: str) -> str:
    found = list(_ANCHOR.finditer(text))
    if not found:
        bare = text.strip()
        # A reply that is nothing but a formula is its own answer.
        if 0 < len(bare) <= _BARE and "\n" not in bare and not _PROSE.search(bare):
            return bare
        raise NoAnswer("no_box")
    last = found[-1]
    answer = next(group for group in (last["tag"], last["hashes"], last["words"]) if group is not None)
    if _HEDGE.search(answer):
        raise NoAnswer("hedged")
    answer = _ENDING.sub("", _CLAUSE.sub("", answer).strip().rstrip(".。!*").strip().lstrip("*").strip())
    if not answer:
        raise NoAnswer("empty_anchor")
    return answer
