"""/generate and /abort_request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from gspo_agent.testing.sglang_server.adapters import Adapters
from gspo_agent.testing.sglang_server.backend import Backend
from gspo_agent.testing.sglang_server.call import Call, Routes
from gspo_agent.testing.sglang_server.faults import Fault
from gspo_agent.testing.sglang_server.reply import answer, completion, failure, refusal
from gspo_agent.testing.sglang_server.scheduler import Request


class Generation:
    def __init__(self, backend: Backend, adapters: Adapters, *, incremental: bool) -> None:
        self.backend, self.adapters, self.incremental = backend, adapters, incremental

    def routes(self) -> Routes:
        return {"POST|PUT /generate": self.generate, "POST /abort_request": self.abort}

    async def abort(self, call: Call) -> web.Response:
        body = call.body
        if body.get("abort_all"):
            self.backend.abort_all()
        elif body.get("rid"):
            self.backend.abort(body["rid"])
        return web.Response()

    async def generate(self, call: Call) -> web.StreamResponse:
        try:
            request = self._admit(call.body, call.faults)
        except ValueError as problem:
            return refusal(problem)
        task = self.backend.spawn(self._serve(request))
        try:
            if request.stream:
                return await self._stream(call, request, task)
            await asyncio.shield(task)
        except ValueError as problem:
            return refusal(problem)
        except asyncio.CancelledError:
            # The client has gone: its request ends as by an abort, when the scheduler hears of it.
            request.gone = True
            self.backend.abort(request.rid)
            raise
        reason = request.finish_reason or {}
        status = reason.get("status_code") if reason.get("type") == "abort" else None
        if status is not None:
            return refusal(reason["message"]) if status == 400 else failure(reason["message"], status)
        return answer(completion(request, self.backend.weight_version))

    def _admit(self, body: Mapping[str, Any], faults: list[Fault]) -> Request:
        """Raises ValueError for what the server refuses before the request waits for anything."""
        prompt, sampling = body.get("input_ids"), body.get("sampling_params") or {}
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError("this server has no tokenizer and takes single requests: input_ids has to be a list[int]")
        if not prompt:
            raise ValueError("input_ids is empty")
        if self.backend.released:
            raise ValueError(f"memory is released: {sorted(self.backend.released)}; the real server breaks here")
        rid = body.get("rid") or uuid.uuid4().hex
        if rid in self.backend.requests:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        max_new_tokens = sampling.get("max_new_tokens", 128)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
        request = Request(
            rid,
            prompt,
            max_new_tokens,
            frozenset(sampling.get("stop_token_ids") or ()),
            sampling.get("sampling_seed") or 0,
            bool(body.get("return_logprob")),
            bool(body.get("stream")),
            sampling.get("stream_interval") or 1,
            f"{body.get('extra_key')} {body.get('lora_path')}",
            body.get("lora_path"),
        )
        for fault in faults:
            reason = fault.finish_reason()
            if reason is not None:
                request.end_at = (fault.after, reason)
        self.backend.requests[rid] = request
        return request

    async def _serve(self, request: Request) -> None:
        """From the gate to the end; goes on without its client. Raises ValueError where the server answers 400."""
        backend = self.backend
        try:
            async with backend.gate.request():
                if request.gone:
                    return
                self.adapters.use(request.adapter)
                self._check_context(request)
                size = backend.model.vocab_size
                if not all(0 <= token < size for token in request.prompt):
                    backend.crash()
                    await asyncio.Event().wait()
                request.tokens = backend.model.tokens(request.prompt, request.seed)
                backend.scheduler.add(request)
                await request.ended.wait()
        finally:
            del backend.requests[request.rid]
            request.news.set()

    def _check_context(self, request: Request) -> None:
        size, prompt, new = self.backend.context_tokens, len(request.prompt), request.max_new_tokens
        if prompt >= size:
            raise ValueError(f"The input ({prompt} tokens) is longer than the model's context length ({size} tokens).")
        if prompt + new > size:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {size} tokens. You requested a "
                f"total of {prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
                "the limit."
            )

    async def _stream(self, call: Call, request: Request, task: asyncio.Task[None]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(call.http)
        faults: list[Fault] = call.faults
        sent = 0
        while True:
            await request.news.wait()
            request.news.clear()
            ended = task.done() or request.finish_reason is not None
            if task.done() and (problem := task.exception()) is not None:
                event: dict[str, Any] = {
                    "error": {"message": str(problem), "type": "invalid_request_error", "code": 400}
                }
            elif len(request.output_ids) - sent < (request.stream_interval if sent else 1) and not ended:
                continue
            else:
                event = completion(request, self.backend.weight_version, start=sent if self.incremental else 0)
            before, sent = sent, len(request.output_ids)
            await self._send(call, response, event, faults, range(before + 1, sent + 1), ended)
            if ended:
                for fault in faults:
                    if fault.kind == "no end":
                        await fault.released()
                await response.write(b"data: [DONE]\n\n")
                return response

    async def _send(
        self,
        call: Call,
        response: web.StreamResponse,
        event: dict[str, Any],
        faults: list[Fault],
        new: range,
        ended: bool,
    ) -> None:
        """Args: new: Counts of the request's tokens that this event is the first with."""
        for fault in faults:
            if fault.kind == "reply":
                fault.change(event)
        line = b"data: " + orjson.dumps(event) + b"\n\n"
        for fault in faults:
            if fault.kind == "late" and ended:
                await fault.released()
            if fault.kind == "cut body" and new.stop > fault.after:
                await response.write(line[: len(line) // 2])
                await call.cut()
            if fault.kind == "duplicate" and (fault.after in new if fault.after else ended):
                await response.write(line)
        await response.write(line)
