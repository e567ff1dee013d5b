"""What a /generate reply of SGLang says: checked, and as segments with the weight version of every token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from gspo_agent.engine.base import Completion, FinishReason
from gspo_agent.engine.request import Asked
from gspo_agent.errors import EngineError
from gspo_agent.trajectory import Segment

Source = Literal["spans", "reply", "dispatch", "adapter"]
"""Where the versions of a reply's tokens come from: `weight_versions`, `weight_version` (servers without spans), what
the server had when the request was sent (servers that say nothing), or the adapter that the request named."""


UNREADABLE = AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError
"""What taking an answer of another shape apart fails with."""
_ROUNDING = 1e-3  # of probabilities near 1, in what a server may compute in
_logprob_of, _id_of = itemgetter(0), itemgetter(1)  # of an entry; its third, the token's text, may be left out


class ForeignWeights(Exception):
    """Tokens of weights that nobody here has published, as those of a server that has just restarted."""


class WrongReply(Exception):
    """An answer to something else than what was asked."""


class Reply(NamedTuple):
    """What came back for one request."""

    completion: Completion
    source: Source
    prefill_tokens: int
    """Prompt tokens that were computed for it."""
    cached_tokens: int
    """Prompt tokens whose keys and values the server still had."""
    discarded: int = 0
    """Tokens of an aborted request that came without everything that belongs to them."""


def read_reply(body: Any, asked: Asked, versions: Mapping[str, int]) -> Reply:
    """Checks a decoded reply and reads it.

    Args:
        versions: What servers call the weights that were published -> our number for them.

    Raises EngineError where lengths or ids do not agree, which asking again would not mend; WrongReply where it answers
    another request, or is none that can be read; ForeignWeights where a token's version is none of `versions`. What an
    abort brings incomplete is left out: those tokens are sampled again.
    """
    try:
        return _read(body, asked, versions)
    except UNREADABLE as error:
        raise WrongReply(f"it cannot be read ({type(error).__name__}: {error}): {str(body)[:300]}") from None


def _read(body: Any, asked: Asked, versions: Mapping[str, int]) -> Reply:
    try:
        meta = body["meta_info"]
        finish = meta["finish_reason"]
        kind = finish["type"]
    except UNREADABLE:
        raise WrongReply(f"no meta_info.finish_reason.type in {str(body)[:300]}") from None
    if meta.get("id", asked.rid) != asked.rid:
        raise WrongReply(f"it is of request {meta['id']!r}")
    ids, logprobs, problem = read_tokens(body, meta, asked.vocab_size, aborted=kind == "abort")
    if problem and kind != "abort":
        raise EngineError(problem)
    if not problem and len(ids) > asked.max_new_tokens:
        raise EngineError(f"{len(ids)} tokens where at most {asked.max_new_tokens} were asked for")
    spans, source = _spans(meta, len(ids), asked.dispatched, versions)
    if asked.adapter is not None:  # an update names the next one while a request still has its own
        spans, source = [(asked.dispatched, 0, len(ids))], "adapter"
    prompt, cached = int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)
    return Reply(
        Completion(
            tuple([Segment(ids[a:b], asked.author, logprobs[a:b], version) for version, a, b in spans if b > a]),
            _finish(finish, ids, asked),
        ),
        source,
        prefill_tokens=max(0, prompt - cached),
        cached_tokens=cached,
        discarded=len(body.get("output_ids") or ()) if problem else 0,
    )


def read_tokens(
    body: Any, meta: Any, vocab_size: int | None, *, aborted: bool = False
) -> tuple[Sequence[int], Sequence[float], str]:
    """Ids, their logprobs, and what does not agree about them; then there are none."""
    ids: list[int] = body.get("output_ids") or []
    entries = meta.get("output_token_logprobs") or []
    if aborted and not ids and entries:  # of a request that was taken back into the queue before it was aborted
        ids = [*map(_id_of, entries)]
    problem = ""
    if len(ids) != len(entries):
        problem = (
            f"{len(ids)} output ids but {len(entries)} output logprobs; without the logprob of every sampled token "
            "nothing can be trained on: see whether the server's options (speculative decoding, for one) drop them"
        )
    elif meta.get("completion_tokens", len(ids)) not in (len(ids), None):
        problem = f"completion_tokens is {meta['completion_tokens']}, but {len(ids)} output ids came"
    elif ids:
        logprobs, named = [*map(_logprob_of, entries)], [*map(_id_of, entries)]
        problem = _disagreement(ids, logprobs, named, vocab_size)
        if not problem:
            return ids, logprobs, ""
    return [], [], problem


def _disagreement(ids: list[int], logprobs: list[Any], named: list[int], vocab_size: int | None) -> str:
    if named != ids:
        place = next(n for n, (id, other) in enumerate(zip(ids, named, strict=True)) if id != other)
        return f"output id {place} is {ids[place]}, but the logprob there is that of {named[place]}"
    try:
        sound = math.isfinite(sum(logprobs)) and max(logprobs) <= _ROUNDING
    except TypeError:
        sound = False
    if not sound:
        if None in logprobs:
            return f"output logprob {logprobs.index(None)} of {len(ids)} is missing"
        wrong = next(value for value in logprobs if not -math.inf < value <= _ROUNDING)
        return f"output logprob {logprobs.index(wrong)} is {wrong}, which is no log-probability"
    if not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < (vocab_size or math.inf)):
        wrong = next(id for id in ids if type(id) is not int or not 0 <= id < (vocab_size or math.inf))
        return f"output id {ids.index(wrong)} is {wrong!r}, outside the vocabulary of {vocab_size}"
    return ""


def _spans(
    meta: Any, length: int, dispatched: int, versions: Mapping[str, int]
) -> tuple[list[tuple[int, int, int]], Source]:
    """[(version, start, end)] over `length` tokens, and where that is known from."""
    spans = meta.get("weight_versions")
    if spans:
        source: Source = "spans"
        found, end = [], 0
        for span in spans:
            start, before, end = int(span["start"]), end, int(span["end"])
            if start != before or end < start:
                break
            found.append((str(span["version"]), start, end))
        if len(found) < len(spans) or (length and end != length):
            raise EngineError(f"the weight versions {spans} do not cover the {length} tokens that came")
    elif meta.get("weight_version") is not None:
        found, source = [(str(meta["weight_version"]), 0, length)], "reply"
    else:
        return [(dispatched, 0, length)], "dispatch"
    foreign = [version for version, start, end in found if version not in versions and end > start]
    if foreign and length:
        raise ForeignWeights(f"tokens of weights {foreign[0]!r}")
    return [(versions[version], a, min(b, length)) for version, a, b in found if version in versions], source


def _finish(finish: Any, ids: Sequence[int], asked: Asked) -> FinishReason:
    """A server also stops at its model's own end tokens: where nobody asked for that, the turn goes on behind them."""
    if ids and ids[-1] in asked.sampling.stop_token_ids:
        return "stop"
    if finish["type"] == "abort":
        return "abort"
    if not ids:
        raise EngineError(f"nothing was sampled, and it says {finish}")
    if finish["type"] == "length" or len(ids) >= asked.sampling.max_new_tokens:
        return "length"
    return "abort"
