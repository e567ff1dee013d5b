"""A reply that comes in increments, and what of it can be used where it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_agent.engine.reply import UNREADABLE, Reply, WrongReply, read_reply
from gspo_agent.engine.request import Asked
from gspo_agent.engine.worker import Refused, Unavailable

_ERRORS = 400  # an abort with a status from there on would be no reply, but an error, if it were not in a stream


class NoIncrement(WrongReply):
    """Every event holds all there is: the server does not send increments, whatever it says of itself."""


class Stream:
    """Takes the events of one request, in the order in which they come.

    Which weights a token has is told at the end alone. Of a stream that is cut, those tokens are certain up to which
    every event named the weights that the request was sent under: an update names its own before it lets go on.
    """

    def __init__(self, asked: Asked, weights: str | None, versions: Mapping[str, int]) -> None:
        """
        Args:
            weights: What the server called its weights when the request was sent.
        """
        self.asked, self.finished = asked, False
        self._weights, self._versions = weights, versions
        self._ids: list[int] = []
        self._entries: list[Any] = []
        self._meta: dict[str, Any] = {}
        self._certain = 0

    def __len__(self) -> int:
        """Tokens that came. From any thread."""
        return len(self._ids)

    def take(self, event: dict[str, Any]) -> bool:
        """Whether it was the last one. Raises WrongReply where it does not go on from the one before; Refused and
        Unavailable for what would otherwise have come as an HTTP status."""
        if "error" in event:
            raise Refused(f"it answered {event['error']}")
        try:
            meta = event["meta_info"]
            finish, count = meta["finish_reason"], int(meta["completion_tokens"])
            ids, entries = event["output_ids"], meta.get("output_token_logprobs") or []
            status = None if finish is None else finish.get("status_code")
            if status is not None and status >= _ERRORS:
                raise (Refused if status < 500 else Unavailable)(f"it ended the request: {finish}")
            self._append(meta, ids, entries, count, finish is not None)
        except UNREADABLE:
            self._certain = 0
            raise WrongReply(f"an event without meta_info, counts and ids: {str(event)[:300]}") from None
        if meta.get("weight_version") == self._weights and self._certain >= len(self._ids) - len(ids):
            self._certain = len(self._ids)
        self._meta, self.finished = meta, finish is not None
        return self.finished

    def _append(self, meta: dict[str, Any], ids: list[int], entries: list[Any], count: int, ended: bool) -> None:
        before = len(self._ids)
        if meta.get("id", self.asked.rid) != self.asked.rid:
            problem = WrongReply(f"an event of request {meta['id']!r}")
        elif before + len(ids) == count:
            self._ids += ids
            self._entries += entries
            return
        elif ended and [entry[1] for entry in entries[-count:]][:before] == self._ids and len(entries) >= count:
            # Of one that ended in the queue: behind what is new there is all again.
            self._entries = entries[-count:]
            self._ids = [entry[1] for entry in self._entries]
            return
        elif count == before and ids == self._ids[before - len(ids) :]:  # said twice
            return
        elif len(ids) == count:
            problem = NoIncrement(f"{count} tokens in one event, of which {before} had come before")
        else:
            problem = WrongReply(f"an event with {len(ids)} tokens that counts {count}, behind {before}")
        self._certain = 0
        raise problem

    def reply(self) -> Reply:
        """What the whole stream says; as `read_reply`."""
        return self._read(len(self._ids), self._meta)

    def rest(self) -> Reply | None:
        """What is certain of a stream that was cut, as of an aborted request; None where nothing is."""
        if not self._certain or self.finished:
            return None
        meta = {**self._meta, "finish_reason": {"type": "abort"}, "completion_tokens": self._certain}
        reply = self._read(self._certain, {**meta, "weight_version": self._weights})
        return reply if reply.completion.segments else None

    def _read(self, count: int, meta: dict[str, Any]) -> Reply:
        body = {
            "output_ids": self._ids[:count],
            "meta_info": {**meta, "output_token_logprobs": self._entries[:count]},
        }
        return read_reply(body, self.asked, self._versions)
