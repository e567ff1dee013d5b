"""The shapes of the server's answers."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from gspo_agent.testing.sglang_server.scheduler import Request


def answer(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def refusal(message: object, status: int = 400) -> web.Response:
    """What a ValueError becomes."""
    return answer({"error": {"message": str(message)}}, status)


def failure(message: str, status: int) -> web.Response:
    """What an HTTPException becomes."""
    return answer({"object": "error", "message": message, "type": str(status), "param": None, "code": status}, status)


def invalid(message: object) -> web.Response:
    """What a body becomes that is not of the form it has to have."""
    content = {"object": "error", "message": str(message), "type": "Bad Request", "param": None, "code": 400}
    return answer(content, 400)


def done(success: bool, message: str, **more: Any) -> web.Response:
    """What the calls around weights answer."""
    return answer({"success": success, "message": message, **more}, 200 if success else 400)


def completion(request: Request, version: str, *, start: int = 0) -> dict[str, Any]:
    """The /generate reply, or one event of a stream, whose output begins at token `start`.

    Args:
        version: Of the weights now.
    """
    ended, queued = request.finish_reason is not None, request.queued
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": request.finish_reason}
    if not queued:
        meta["prompt_tokens"] = len(request.prompt)
    meta["weight_version"] = version
    if not queued:
        meta["num_retractions"] = request.num_retractions
    if request.return_logprob:
        pairs = zip(request.logprobs, request.output_ids, strict=True)
        logprobs = [[logprob, token, None] for logprob, token in pairs]
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = logprobs if queued else logprobs[start:]
        meta["output_token_logprobs_length"] = len(logprobs)
    meta["completion_tokens"] = len(request.output_ids)
    if not queued:
        meta |= {"reasoning_tokens": 0, "cached_tokens": request.cached_tokens, "dp_rank": None}
    if ended:
        meta["weight_versions"] = request.spans()
        meta["weight_version"] = meta["weight_versions"][-1]["version"]
        meta["e2e_latency"] = time.perf_counter() - request.began
        if not request.stream:
            meta["response_sent_to_client_ts"] = time.time()
    # In a stream of increments, what ends in the queue repeats its last token.
    begin = max(len(request.output_ids) - 1, 0) if queued and start else start
    return {"output_ids": request.output_ids[begin:], "meta_info": meta}
