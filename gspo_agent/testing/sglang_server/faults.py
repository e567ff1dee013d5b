"""Faults to be ordered from the server, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gspo_agent.testing.sglang_server.scheduler import ABORTED, WAITING

Reply = dict[str, Any]
Kind = Literal[
    "status",
    "stall",
    "cut",
    "crash",
    "abort",
    "abort in queue",
    "abort before prefill",
    "late",
    "cut body",
    "duplicate",
    "no end",
    "reply",
    "unchanged",
]
"""On any route:

status    answered with `status` and `message`; nothing is done.
stall     nothing happens until `release()`, then it goes on as if nothing had been.
cut       the connection is closed without an answer; nothing is done.
crash     the whole server goes down, every connection with it.
late      all is done; the answer waits for `release()`.
cut body  all is done; the connection is closed in the middle of the answer; in a stream, of the first event with
          `after` tokens.
duplicate the answer is sent once more at `release()`, on a connection that may serve another request by then; in a
          stream, the last event is sent twice, or with `after` the first one with so many tokens.
reply     `change` edits the answer; see WRONG for ready ones.

On /generate:

no end                a stream lacks its [DONE], and stays open until `release()`.
abort                 after `after` tokens; with a `status` it becomes an HTTP error, as the server does.
abort in queue        as of a request that waits, or waits again, with `after` earlier tokens.
abort before prefill  as older servers say it.

On an update, or the loading of an adapter: unchanged  answered with success, but nothing is done.
"""


@dataclass(eq=False, slots=True)
class Fault:
    kind: Kind
    route: str = "/generate"
    rid: str = ""
    """Only requests whose id starts with this."""
    times: int | None = 1
    """How often it strikes; None: until it is taken out of `server.faults`."""
    skip: int = 0
    """How many matching calls pass first."""
    after: int = 0
    status: int | None = None
    message: str = "ordered"
    change: Callable[[Reply], None] = lambda reply: None
    struck: int = 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"unknown fault {self.kind!r}; one of {', '.join(get_args(Kind))}")

    def meets(self, route: str, rid: str) -> bool:
        """Whether it strikes this call; counts it."""
        if route != self.route or not rid.startswith(self.rid) or self.struck == self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.struck += 1
        return True

    def release(self) -> None:
        self._released.set()

    async def released(self) -> None:
        await self._released.wait()

    def finish_reason(self) -> dict[str, Any] | None:
        """How it ends a request, None where it does not."""
        if self.kind == "abort in queue":
            return dict(WAITING)
        if self.kind == "abort before prefill":
            return {**ABORTED, "message": "Abort before prefill"}
        if self.kind == "abort":
            return {**ABORTED, "message": self.message, "status_code": self.status} if self.status else dict(ABORTED)
        return None


def _meta(key: str) -> Callable[[Reply], None]:
    return lambda reply: reply["meta_info"].pop(key, None)


def _both(*changes: Callable[[Reply], None]) -> Callable[[Reply], None]:
    def change(reply: Reply) -> None:
        for one in changes:
            one(reply)

    return change


def _logprobs(keep: slice) -> Callable[[Reply], None]:
    def change(reply: Reply) -> None:
        meta = reply["meta_info"]
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = meta["output_token_logprobs"][keep]

    return change


def _other_id(reply: Reply) -> None:
    if reply["output_ids"]:
        reply["output_ids"][-1] ^= 1


def _count(reply: Reply) -> None:
    reply["meta_info"]["completion_tokens"] += 1


def _short_spans(reply: Reply) -> None:
    spans = reply["meta_info"].get("weight_versions")
    if spans:
        spans[-1]["end"] -= 1


def _no_ids(reply: Reply) -> None:
    del reply["output_ids"]


WRONG: dict[str, Callable[[Reply], None]] = {
    "no spans": _meta("weight_versions"),
    "no versions": _both(_meta("weight_versions"), _meta("weight_version")),
    "no logprobs": _meta("output_token_logprobs"),
    "first logprob only": _logprobs(slice(1)),
    "a logprob less": _logprobs(slice(-1)),
    "an id less": lambda reply: reply["output_ids"].pop() and None,
    "another id": _other_id,
    "no ids": _no_ids,
    "a wrong count": _count,
    "short spans": _short_spans,
    "no finish reason": _meta("finish_reason"),
    "another rid": lambda reply: reply["meta_info"].update(id="another"),
}
"""Ready changes of a /generate reply, for faults of the kind "reply"."""
