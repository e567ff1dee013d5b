"""What a /generate reply of SGLang says: checked, and as segments with the weight version of every token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
_LEAST = -1e30  # well within float32
_MOST_IDS = 1 << 31


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
            tuple([Segment.of(ids[a:b], asked.author, logprobs[a:b], version) for version, a, b in spans if b > a]),
            _finish(finish, ids, asked),
        ),
        source,
        prefill_tokens=max(0, prompt - cached),
        cached_tokens=cached,
        discarded=len(body.get("output_ids") or ()) if problem else 0,
    )


def read_tokens(
    body: Any, meta: Any, vocab_size: int | None, *, aborted: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.float32], str]:
    """Ids, their logprobs, and what does not agree about them; then there are none."""
    ids: list[int] = body.get("output_ids") or []
    # [logprob, id, text] of each token; the text may be left out.
    entries = meta.get("output_token_logprobs") or []
    if aborted and not ids and entries:  # of a request that was taken back into the queue before it was aborted
        ids = [entry[1] for entry in entries]
    problem = ""
    if len(ids) != len(entries):
        problem = (
            f"{len(ids)} output ids but {len(entries)} output logprobs; without the logprob of every sampled token "
            "nothing can be trained on: see whether the server's options (speculative decoding, for one) drop them"
        )
    elif meta.get("completion_tokens", len(ids)) not in (len(ids), None):
        problem = f"completion_tokens is {meta['completion_tokens']}, but {len(ids)} output ids came"
    elif ids:
        logprobs, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
        # Numbers are looked at as Python has them, and become arrays last: a call of numpy costs as much as all looks.
        try:
            if (
                named == ids
                and max(ids) < (vocab_size or _MOST_IDS)
                and max(logprobs) <= _ROUNDING
                and sum(logprobs) > _LEAST
                and set(map(type, ids)) == {int}  # `true` is equal to 1
            ):
                unsigned = array("I", ids)  # no negative
                return np.frombuffer(unsigned, np.int32), np.frombuffer(array("f", logprobs), np.float32), ""
        except (OverflowError, TypeError):
            pass
        problem = _disagreement(ids, logprobs, named, vocab_size)
    return np.empty(0, np.int32), np.empty(0, np.float32), problem


def _disagreement(ids: list[Any], logprobs: list[Any], named: list[Any], vocab_size: int | None) -> str:
    """What it is, where there is one. Raises TypeError for what is no number."""
    for place, (id, other, logprob) in enumerate(zip(ids, named, logprobs, strict=True)):
        if id != other:
            return f"output id {place} is {id!r}, but the logprob there is that of {other!r}"
        if logprob is None:
            return f"output logprob {place} of {len(ids)} is missing"
        if not _LEAST < logprob <= _ROUNDING:
            return f"output logprob {place} is {logprob:g}, which is no log-probability"
        if type(id) is not int or not 0 <= id < (vocab_size or _MOST_IDS):
            return f"output id {place} is {id!r}, outside the vocabulary of {vocab_size}"
    return f"the output logprobs add up to {sum(logprobs)}"


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


def _finish(finish: Any, ids: NDArray[np.int32], asked: Asked) -> FinishReason:
    """A server also stops at its model's own end tokens: where nobody asked for that, the turn goes on behind them."""
    if len(ids) and ids.item(-1) in asked.sampling.stop_token_ids:
        return "stop"
    if finish["type"] == "abort":
        return "abort"
    if not len(ids):
        raise EngineError(f"nothing was sampled, and it says {finish}")
    if finish["type"] == "length" or len(ids) >= asked.sampling.max_new_tokens:
        return "length"
    return "abort"
