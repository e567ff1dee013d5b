"""One SGLang server: its calls, what they fail with, and what is known about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from gspo_agent.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from gspo_agent.engine.base import Source
    from gspo_agent.engine.call import Call
    from gspo_agent.engine.router import Router

OLDEST = "0.5.6"
"""The oldest SGLang that is spoken with: the first with pause modes, cache namespaces and /model_info."""
_MOST_CHARACTERS = 500
_PARTS = "weights", "kv_cache"
_RELEASED = " released "
_JSON = {"Content-Type": "application/json"}
_STREAM_END = b"data: [DONE]"
_TAIL_SECONDS = 1.0


class Unavailable(Exception):
    """Nothing came of a call, and the next one, or another server, may do better: 5xx, 429, too slow."""


class Unreachable(Unavailable):
    """The connection could not be made, or was cut."""


class Refused(EngineError):
    """The server understood and said no (4xx); it would say it again."""

    status: int | None = None


class State(StrEnum):
    OUT = "out"
    """It gets no request: not reachable, or not at the current weights."""
    SERVING = "serving"
    UPDATING = "updating"
    """As serving, but new requests wait until it has the weights."""


class Worker:
    """One server, asked directly or through the router that it is behind."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, router: Router | None = None) -> None:
        self.url, self.router = url, router
        self.state = State.OUT
        self.problem = "not looked at yet"
        """Why it is out."""
        self.weights: str | None = None
        """What it called its weights when it was last asked."""
        self.sglang = ""
        """Its version of SGLang; "" before it was examined."""
        self.precision = ""
        """What it computes in, as far as it says so."""
        self.max_prompt = 0
        self.increments = False
        """Whether its streams hold what is new, not all there is again."""
        self.ranks = 1
        """Tensor-parallel ranks."""
        self.replicas = 1
        """Data-parallel ones, and pipeline stages: of both, transfers know one."""
        self.cuda = self.saves_memory = self.takes_adapters = False
        self.link: tuple[Source, str] | None = None
        """Its process group with whoever has the weights: there, and its name."""
        self.proven = False
        """Whether it was compared, as far as anybody wants that, since it was examined."""
        self.unproven_at: str | None = None
        """The weights under which it could not be compared."""
        self.withdrawn = False
        """Whether it was taken from its router here."""
        self.misses = 0
        """Looks without an answer, one after another."""
        self.calls: set[Call] = set()
        """Requests in flight."""
        self.lock = asyncio.Lock()
        """Held by who changes its weights."""
        self.wanted = asyncio.Event()
        """Set where it should be looked at now."""
        self._http = http

    @property
    def entry(self) -> str:
        """Where its requests are sent."""
        return self.url if self.router is None else self.router.url

    async def post(
        self, path: str, body: dict[str, Any] | None = None, *, seconds: float | None = 30.0
    ) -> dict[str, Any]:
        """The decoded answer. Raises Unavailable and Refused."""
        return _decoded(await self._call("POST", self.url + path, orjson.dumps(body or {}), seconds=seconds))

    async def get(self, path: str, *, seconds: float | None = 10.0) -> dict[str, Any]:
        return _decoded(await self._call("GET", self.url + path, seconds=seconds))

    async def generate(self, body: bytes, session: str) -> dict[str, Any]:
        """The decoded reply to one request; waits as long as it takes."""
        return _decoded(await self._send("POST", self.entry + "/generate", body, self._headers(session)))

    async def stream(self, body: bytes, session: str, take: Callable[[dict[str, Any]], bool]) -> None:
        """Gives every event of a request's stream to `take`, until that says that it was the last. Raises Unreachable
        where the stream ends before."""
        url, rest, last = self.entry + "/generate", b"", False
        try:
            async with (
                self._http.request("POST", url, data=body, headers=self._headers(session)) as response,
                asyncio.timeout(None) as deadline,
            ):
                if response.status >= 300:
                    raise _failure(url, response.status, await response.read())
                async for part in response.content.iter_any():
                    *events, rest = (rest + part).split(b"\n\n")
                    for event in events:
                        if not last and event != _STREAM_END and take(_decoded(event.removeprefix(b"data:"))):
                            last = True  # behind it comes what leaves the connection free for the next request
                            deadline.reschedule(asyncio.get_running_loop().time() + _TAIL_SECONDS)
        except (aiohttp.ClientError, OSError) as error:
            if not last:
                raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error
        if not last:
            raise Unreachable(f"{url}: the stream ended before its request did")

    async def examine(self) -> None:
        """Learns what it is. Raises ConfigError for a server that cannot be worked with."""
        info = await self._get_either("/server_info", "/get_server_info")
        sglang = str(info.get("version", ""))
        if _order(sglang) < _order(OLDEST):
            raise ConfigError(
                f"{self.url} runs SGLang {sglang or 'of unknown version'}; the oldest that is supported is {OLDEST}"
            )
        model = await self.model_info()
        if model.get("is_generation") is False:
            raise ConfigError(f"{self.url} serves {model.get('model_path')!r}, which generates nothing")
        try:
            self.ranks, self.cuda = int(info.get("tp_size") or 1), info.get("device") == "cuda"
            self.saves_memory = bool(info.get("enable_memory_saver"))
            self.takes_adapters = bool(info.get("enable_lora"))
            self.replicas = int(info.get("dp_size") or 1) * int(info.get("pp_size") or 1)
            self.max_prompt = int(info.get("max_req_input_len") or info.get("context_length") or 0)
            self.increments = bool(info.get("incremental_streaming_output"))
        except (TypeError, ValueError) as error:
            raise Unavailable(f"{self.url}/server_info cannot be read ({error}): {str(info)[:200]}") from None
        dtype, quantization = info.get("dtype"), info.get("quantization")
        self.precision = " and ".join(str(said) for said in (dtype, quantization) if said)
        self.sglang = sglang

    async def require(self, routes: Iterable[str]) -> None:
        """Raises ConfigError where it lacks one of these calls, all of which have to be posted."""
        for route in routes:
            try:
                await self.get(route)
            except Refused as refused:  # 405 from one that has it
                if refused.status == 404:
                    raise ConfigError(
                        f"{self.url} runs SGLang {self.sglang}, which has no {route}; update it, or see whether "
                        "something between here and there passes only some calls on"
                    ) from None

    async def model_info(self) -> dict[str, Any]:
        """What it serves; notes its weights."""
        info = await self._get_either("/model_info", "/get_model_info")
        version = info.get("weight_version")
        self.weights = None if version is None else str(version)
        return info

    async def pause(self, mode: str) -> None:
        """Returns when no token is being computed."""
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """It computes again, unless its memory is released."""
        if not self.released:
            await self.post("/continue_generation", {})

    @property
    def released(self) -> list[str]:
        """Parts of its memory that are. What it calls its weights says so, since nothing else of a server does, and
        whoever released them may have died."""
        return (self.weights or "").partition(_RELEASED)[2].split()

    async def release(self) -> None:
        """Lets go of its memory until it is given weights; it is paused, and nothing is held in place."""
        if not self.saves_memory:
            raise ConfigError(
                f"{self.url} cannot release its memory: start it with --enable-memory-saver, or write "
                'engine.placement = "separate"'
            )
        before = self.weights or ""
        await self.call_weights(self._named("none", _PARTS))
        try:
            await self._call(
                "POST", self.url + "/release_memory_occupation", orjson.dumps({"tags": _PARTS}), seconds=60
            )
        except Refused:
            await self.call_weights(before)
            raise

    async def _regain(self, *parts: str) -> None:
        if self.released:
            await self.model_info()  # it may have restarted
        for part in parts:
            if part in self.released:
                await self._call(
                    "POST", self.url + "/resume_memory_occupation", orjson.dumps({"tags": [part]}), seconds=60
                )
                await self.call_weights(self._named("none", [other for other in self.released if other != part]))

    @staticmethod
    def _named(what: str, released: Sequence[str]) -> str:
        return f"{what}{_RELEASED}{' '.join(released)}" if released else what

    async def abort(self, rid: str) -> None:
        """Ends the requests whose id begins with `rid`. Servers of one tokenizer process want the id of one that is
        there, exactly."""
        await self._call("POST", self.url + "/abort_request", orjson.dumps({"rid": rid, "abort_all": False}), seconds=5)

    async def load(self, path: str, version: str, *, flush_cache: bool, seconds: float) -> None:
        """Takes the weights from a directory, and sees that it has them. Raises Refused where it hasn't."""
        await self._regain(*_PARTS)
        body = {"model_path": path, "weight_version": version, "abort_all_requests": False, "flush_cache": flush_cache}
        answer = await self.post("/update_weights_from_disk", body, seconds=seconds)
        if not answer.get("success"):
            raise Refused(f"{self.url} did not take weights {version} from {path}: {answer.get('message')}")
        await self._verify(version)

    async def adapters(self) -> set[str]:
        """What it calls the adapters that it has."""
        listed = await self.get("/v1/models")
        try:
            return {str(each["id"]) for each in listed["data"] if each.get("parent")}
        except (AttributeError, KeyError, TypeError):
            raise Unavailable(f"{self.url}/v1/models cannot be read: {str(listed)[:200]}") from None

    async def load_adapter(self, path: str, name: str, *, seconds: float) -> None:
        """Takes an adapter from a directory, and sees that it has it. Raises Refused where it hasn't."""
        if name not in await self.adapters():
            await self.post("/load_lora_adapter", {"lora_name": name, "lora_path": path}, seconds=seconds)
            if name not in await self.adapters():
                raise Refused(f"{self.url} does not list adapter {name} after it was loaded from {path}")
        await self.call_weights(name)
        await self._verify(name)

    async def unload_adapter(self, name: str) -> None:
        """Returns when no request uses it any more, and it is gone."""
        await self.post("/unload_lora_adapter", {"lora_name": name})

    async def begin_update(self, version: str) -> None:
        """What comes until `end_update` are parts of these weights; meanwhile it says that it has neither the old nor
        the new, for whoever finds it so."""
        await self._regain("weights")
        await self.call_weights(self._named(f"{version} unfinished", self.released))
        try:
            await self.post("/begin_weight_update")
        except Refused:  # what did not come to an end is still open
            await self.post("/end_weight_update")
            await self.post("/begin_weight_update")

    async def end_update(self, version: str) -> None:
        """It has all parts. Raises Refused where it does not say so."""
        await self.post("/end_weight_update")
        await self._regain("kv_cache")
        await self.call_weights(version)
        await self._verify(version)

    async def call_weights(self, version: str) -> None:
        """What it has is called so from now on."""
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self.weights = version

    async def _verify(self, version: str) -> None:
        await self.model_info()
        if self.weights != version:
            raise Refused(f"{self.url} reports weights {self.weights!r} after an update to {version!r}")

    async def _get_either(self, path: str, older: str) -> dict[str, Any]:
        try:
            return await self.get(path)
        except Refused:
            return await self.get(older)

    async def _call(self, method: str, url: str, body: bytes | None = None, *, seconds: float | None) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                return await self._send(method, url, body)
        except TimeoutError:
            raise Unreachable(f"{url}: no answer in time") from None

    async def _send(self, method: str, url: str, body: bytes | None, headers: dict[str, str] = _JSON) -> bytes:
        try:
            async with self._http.request(method, url, data=body, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error
        if response.status >= 300:
            raise _failure(url, response.status, raw)
        return raw

    def _headers(self, session: str) -> dict[str, str]:
        return _JSON if self.router is None else {**_JSON, "X-SMG-Routing-Key": session}


def _failure(url: str, status: int, raw: bytes) -> Unavailable | Refused:
    text = f"{url} answered {status}: {raw[:_MOST_CHARACTERS].decode(errors='replace')}"
    if status >= 500 or status in (408, 425, 429):
        return Unavailable(text)
    refused = Refused(text)
    refused.status = status
    return refused


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        content = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise Unavailable(f"an answer that is no JSON ({error}): {raw[:100]!r}") from None
    if not isinstance(content, dict):
        raise Unavailable(f"an answer that is no JSON object: {raw[:100]!r}")
    return content


def _order(version: str) -> tuple[int, ...]:
    """ "0.5.23.post1" -> (0, 5, 23); what is no number ends it."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
