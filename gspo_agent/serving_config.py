"""[engine.servers]: the SGLang servers that are started here."""

from __future__ import annotations

from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from gspo_agent.section import Positive, Seconds, Section

_SET_HERE = {
    **dict.fromkeys(("model", "model-path"), "model"),
    **dict.fromkeys(("host", "port"), "engine.servers.host and .port"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "engine.servers.tp"),
    **dict.fromkeys(("dp", "dp-size", "data-parallel-size"), "engine.servers.dp"),
    **dict.fromkeys(("base-gpu-id", "gpu-id-step"), "engine.servers.gpus"),
}
"""Option of a server -> where it comes from."""


_LAST_PORT = 65535


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        wrong = not parts.hostname or parts.port == 0 or parts.query or parts.fragment or any(map(str.isspace, url))
    except ValueError as error:
        raise ValueError(f"{url!r} is no address of a server ({error}); write it as in http://a:30000") from None
    if wrong:
        raise ValueError(f"{url!r} is no address of a server; write it as in http://a:30000")
    return url


Address = Annotated[str, Field(pattern=r"^https?://[^/]+"), AfterValidator(_address)]


class ServersConfig(Section):
    """SGLang servers of this machine, which a run starts, watches and ends, where no `engine.urls` are given; or
    `gspo-agent serve` does, and runs on the same directory use those."""

    count: Positive = 1
    tp: Positive = 1
    """GPUs that one copy of the model is spread over."""
    dp: Positive = 1
    """Copies of the model in one server."""
    args: dict[str, Any] = {}
    """Further options of the server: { quantization = "fp8", enable_x = true } is `--quantization fp8 --enable-x`."""
    python: str = ""
    """The interpreter that has SGLang; "": the one that runs this."""
    module: str = "sglang.launch_server"
    """What that interpreter runs."""
    env: dict[str, str] = {}
    """Further variables of its environment."""
    host: str = "127.0.0.1"
    """Where they listen. "0.0.0.0": runs of other machines can use them, by `engine.urls`."""
    port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """The first one's; the others' follow. None: free ones, the same again for the same run directory."""
    gpus: list[Annotated[int, Field(ge=0)]] | None = None
    """Those to share out among them, as this process counts them. None: the ones that the learner does not use."""
    ready: Seconds = 1800.0
    """Time from a start until it can compute a token."""
    hang: Seconds = 600.0
    """One that answers nothing for so long is started again. It has to be more than what loading weights takes."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Times in an hour that one is started again; then it is given up, and with the last of them the run stops."""

    @model_validator(mode="after")
    def _ours(self) -> Self:
        for name in self.args:
            if (option := name.replace("_", "-")) in _SET_HERE:
                raise ValueError(f"args.{name} is not passed on; it is set by {_SET_HERE[option]}")
        last = (self.port or 1) + self.count - 1
        if last > _LAST_PORT:
            raise ValueError(
                f"port {self.port} and the next for {self.count} servers end at {last}; {_LAST_PORT} is the last"
            )
        return self

    def replicated(self) -> str | None:
        """What makes one server hold the model more than once, or in stages, as `name = value`."""
        stages = {"pp-size", "pipeline-parallel-size"}
        found = [f"args.{name} = {n}" for name, n in self.args.items() if name.replace("_", "-") in stages and n != 1]
        return f"dp = {self.dp}" if self.dp > 1 else next(iter(found), None)
