"""Finding the final answer in one assistant message."""

from __future__ import annotations

import re

from rewards.math_answer.outcomes import NoAnswer

WINDOW = 20_000
"""Characters at the end of a message that are searched."""
MAX_DEPTH = 40
MAX_ANCHORED = 2000
_BARE = 100

_THINKING = r"(?:think|thinking|thought|reasoning)"
_THINKING_TAG = re.compile(rf"<(/?){_THINKING}(?:\s[^<>]*)?>", re.IGNORECASE)


def extract(text: str, *, anchors: bool = True) -> str:
    r"""The last answer of `text`: the last `\boxed` or `\fbox`, boxes side by side as a list, else an explicit anchor.

    Never an earlier box than the last, never "the last number". Only what follows the thinking counts. Raises NoAnswer,
    also where the words around it say that it is not the answer.
    """
    said = _after_thinking(text)[-WINDOW:]
    boxes = find_boxes(said)
    if boxes:
        answer = last_boxes(said, boxes)
        _refuse_taken_back(said, boxes[-1], answer)
        return answer
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
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;$.&|()]|\\[,; \\()\[\]]|\\q?quad(?![A-Za-z])|\\text\{\s*(?:and|or)\s*\}"
    r"|(?:and|also|as\s+well\s+as|or|else|nor|vs|versus|maybe|perhaps|possibly|probably|alternatively"
    r"|otherwise|rather|either|y|o|u|e|et|ou|und|oder|ni|и|или|和|或|或者|또는|または)(?![^\W\d_]))*"
)
r"""What makes a list of two boxes: they are both given, or the one instead of the other."""
_JOINED_BOXES = re.compile(
    r"[\s$]*(?:[-+*/=<>:~–—×·]|\\(?:cdot|times|pm|to|le|leq|ge|geq|ne|neq|approx|div|cup|cap|circ)|to|bis|à)[\s$]*"
)
_NEAR = 40


def find_boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every outermost box; content "" and end -1 for one that is not closed."""
    first = _BOX.search(text)
    if not first:
        return []
    found = []
    closings = _closings(text, first.start())
    position = first.start()
    while match := _BOX.search(text, position):
        end = closings.get(match.end(), -1)
        if end < 0:
            found.append((match.start(), -1, ""))
            position = match.end()
        else:
            found.append((match.start(), end + 1, text[match.end() + 1 : end]))
            position = end + 1
    return found


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _closings(text: str, start: int) -> dict[int, int]:
    """Where each brace that is opened behind `start` is closed."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text, start):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            found[opened.pop()] = brace.start()
    return found


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


_MATHS = r"(?:\s|\\[(\[]|[$*(\[])*"
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|isn't|isn’t|aren't|wasn't|can't|won't|neither)"
    r"(?:\s+(?:be|equal|equals|equal to|to|the answer|it))*"
    rf"|不是|并非|并不是|не){_MATHS}$",
    re.IGNORECASE,
)
"""Behind this stands what the answer is not."""
_NEGATIONS = ("n't", "n’t", "not", "never", "neither", "不是", "并非", "не")
"""One of which is in it: found sooner."""
_WITHDRAWN = re.compile(
    r"(?:[\s$.,:;!)\]*\\—-]|\b(?:oh|hmm|wait|no|actually|sorry|oops)\b)*\b(?:(?:it|that|this|which)\s*)?"
    r"(?:is|was|isn't|isn’t|wasn't|'s|’s)"
    r"\s+(?:\w+\s+)?(?:wrong|incorrect|false|mistaken|(?:a|my)\s+mistake|not\s+(?:right|correct|the|valid|true|it)\b"
    r"|(?<=n't\s)(?:right|correct|the\s+answer))",
    re.IGNORECASE,
)
_PREFIXED = re.compile(r"(?:[=$]|\\[(\[])\s*(?:[-−–]|\\sqrt\s*\{)\s*$")
_SUFFIXED = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*(?:\\circ|\\degree|°))|_ *[\d{]|[*/×·] *[\d\\]|\\(?:times|cdot|div)(?![A-Za-z]))"
    r"[^\n=]*(?:\n|$)"
)
r"""-\boxed{7}, \boxed{7}^2 and \boxed{7} \times 10^3 are other numbers; \boxed{4} \times 3 = 12 is a gap filled in."""


def _refuse_taken_back(text: str, box: tuple[int, int, str], answer: str) -> None:
    """Raises NoAnswer where the words around the last box say that it is not the answer, or not the whole of it."""
    start, end, _ = box
    before, after = text[max(start - _BARE, 0) : start], text[end : end + _BARE]
    if any(map(before.casefold().__contains__, _NEGATIONS)) and _DENIED.search(before):
        raise NoAnswer("denied_box")
    if _WITHDRAWN.match(after):
        raise NoAnswer("withdrawn_box")
    if (before.rstrip().endswith(("-", "−", "–", "{")) and _PREFIXED.search(before)) or _SUFFIXED.match(after):
        raise NoAnswer("joined_boxes")
    try:
        later = _stated(text[end:])
    except NoAnswer:
        return
    if later and _plain(later) and _plain(answer) and _plain(later) != _plain(answer):
        raise NoAnswer("contradicted_box")


def _plain(answer: str) -> str:
    """The digits of a plain number; "" for anything else."""
    bare = answer.strip("$ ").replace(",", "")
    return bare if re.fullmatch(r"-?\d+", bare) else ""


# Anchors: "The answer is ..." in several languages


_ANCHOR = re.compile(
    r"<answer>(?P<tag>[^<>]{0,1000})</answer>|####(?P<hashes>[^\n]*)|(?:"
    r"final\s+answer|correct\s+answer|the\s+answer|\banswer\s*(?=[:*=])|最终答案|答案|答え|答(?=[:：])|정답|(?<!\w)답(?=[:은])"
    r"|ответ|respuesta(?:\s+final)?|réponse(?:\s+finale)?|antwort|lösung\s*(?=:)|ergebnis\s*(?=:)|risposta|resposta"
    r"|đáp\s+(?:án|số)|cevap|odpowied[źz]|उत्तर|الجواب|الإجابة"
    r")(?:\*\*)?\s*(?:(?:is|es|est|ist|lautet|è|é|jest|là)(?!\w)|是|为|為|は|은|는)?\s*(?:\*\*)?\s*[:：=]?\s*(?:\*\*\s*\n\s*)?"
    r"(?P<words>(?:(?:\$\$|\\\[)\s*)?[^\n]*)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:not|never|either|neither|between|about|around|approximately|approx|roughly|or|maybe|perhaps|could|might|but"
    r"|probably|possibly|unless|one of|cannot|unknown)\b|n't\b"
    r"|[?≈~]|\\approx|可能|或|不是|之间|左右|大约|约|아니|아닙|또는|ではない|ではあり|じゃない|または",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r",? (?:since|because|porque|weil|car) .*|,? as (?:claimed|desired|required|needed|expected|wanted)\b.*"
    r"|[.。!] \S.*|。.*"
)
_SUPPOSED = re.compile(
    r"(?:n't|n’t|\b(?:not|never|nobody|none|doubt|whether|if|unless|suppose|assume|mistake|wrong|false|untrue))"
    r"(?:\s+(?:that|to|say|says|think|thinks|believe|believes|claim|claims|the case|it|is|be|so|true|sure|certain"
    r"|us|me))*\s*$",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\b(?:wait|actually|no(?= *[,.!:–—-])|oops|sorry|hmm|mistake|error|wrong|incorrect|correction|should be"
    r"|scratch that|not (?:right|correct))\b",
    re.IGNORECASE,
)
_ENDING = re.compile(r" ?(?:입니다|이다|です|である|だ)$")
_PROSE = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{2,}")


def _anchored(text: str) -> str:
    answer = _stated(text)
    if answer is not None:
        return answer
    bare = text.strip()
    # A reply that is nothing but a formula is its own answer.
    if 0 < len(bare) <= _BARE and "\n" not in bare and not _PROSE.search(bare):
        return bare
    raise NoAnswer("no_box")


def _stated(text: str) -> str | None:
    """What stands behind the last anchor; None where there is none. Raises NoAnswer where it is in doubt."""
    found = list(_ANCHOR.finditer(text))
    if not found:
        return None
    last = found[-1]
    answer = next(group for group in (last["tag"], last["hashes"], last["words"]) if group is not None)
    if len(answer) > MAX_ANCHORED:
        raise NoAnswer("long_anchor")
    answer = " ".join(answer.split())
    if _HEDGE.search(answer):
        raise NoAnswer("hedged")
    if _SUPPOSED.search(text[max(last.start() - _BARE, 0) : last.start()]):
        raise NoAnswer("hedged")
    kept = _CLAUSE.sub("", answer)
    if _DOUBT.search(answer[len(kept) :]) or _DOUBT.search(text[last.end() : last.end() + MAX_ANCHORED]):
        raise NoAnswer("withdrawn")
    kept = kept.strip("* ")
    if not kept.endswith(("..", "…")):
        kept = kept.rstrip(".。!* ")
    answer = _ENDING.sub("", kept).strip()
    if not answer:
        raise NoAnswer("empty_anchor")
    return answer
