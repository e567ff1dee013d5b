"""Every knob, typed, with its sentence under it; read from TOML, changed by `key=value`.

An unknown or ill-typed key is one line with its place and the nearest right name, before anything is loaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from gspo_agent.errors import ConfigError
from gspo_agent.explanation import explain
from gspo_agent.learner_config import LOSS_SECTIONS, LearnerConfig
from gspo_agent.overrides import override_key
from gspo_agent.section import Directory, Positive, Seconds, Section, Seed
from gspo_agent.serving_config import Address, ServersConfig


class Limits(Section):
    """What one episode may use; a limit that is reached ends it as truncated, and it is scored."""

    turns: Positive = 16
    """Assistant turns."""
    turn_tokens: Positive = 1024
    """Sampled tokens in one turn."""
    episode_tokens: Positive | None = None
    """Sampled tokens in the whole episode."""
    context_tokens: Positive = 4096
    """Prompt, sampled and environment tokens together."""
    tool_calls: Positive | None = None
    """Calls that were run, over all turns."""
    wall: Seconds | None = None
    """Time in this episode's own turns and tools, summed over all its lives. Waiting for a quota, for a turn in the
    sandbox, or for an engine that is paused, is not its own time."""
    score: Seconds = 600.0
    """Time for one `score`, less what that waits for its turn in the sandbox. Past it there is no verdict: the episode
    has failed and is tried again, never reward 0."""


class QuotaConfig(Section):
    """How much of something that many episodes ask for may be used. A rate limits how often, a concurrency how many
    at once; callers wait in the order in which they came."""

    rate: Annotated[float, Field(gt=0)] | None = None
    """Calls in one `period`."""
    period: Seconds = 1.0
    concurrency: Positive | None = None


class EnvConfig(Section):
    """One environment and its tasks."""

    id: str
    """A registered id (`gspo_agent/Calculator-v0`), or `module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""
    tasks: dict[str, str] = {}
    """Split -> JSONL file or source (see `gspo_agent.tasks`). Without it the environment's own `tasks(split)`."""
    bad_tasks: Literal["refuse", "drop"] = "refuse"
    """Rows of task files that cannot be used are listed; then the run stops before it begins, or leaves them out."""
    rewards: dict[str, float] | None = None
    """Component of the score -> weight; components that are not named are only shown. None: all count, weight 1."""
    limits: Limits = Limits()
    quotas: dict[str, QuotaConfig] = {}
    """Tool -> its quota over all episodes, as in `search = { rate = 5, concurrency = 2 }`; "score" is the judge."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the groups, relative to the other environments."""


_LOCAL_ONLY = ("max_running",)
_SGLANG_ONLY = "weights", "bucket_mb", "pause_mode", "flush_cache", "stream"


class EngineConfig(Section):
    """Where tokens come from."""

    kind: Literal["local", "sglang"] = "local"
    """"local": the model inside this process. "sglang": SGLang servers."""
    urls: list[Address] = []
    """Of the servers, as in ["http://a:30000"], or of routers. None: those of `servers`. They are one run's at a time:
    two would take them from each other again and again, each for its own weights."""
    servers: ServersConfig = ServersConfig()
    placement: Literal["separate", "colocated"] = "separate"
    """"colocated": servers and learner share GPUs. While the learner works, the servers release their memory; episodes
    stay as they are, and what was computed for them is computed anew. Servers need `--enable-memory-saver`; those
    of `servers` get it."""
    weights: Literal["disk", "distributed", "tensor"] = "disk"
    """How weights reach servers. "disk": through the run directory, which they see under the same path. "distributed":
    sent by the learner, over NCCL between GPUs, else over gloo. "tensor": handed over by the learner, which is on the
    same machine."""
    bucket_mb: Positive = 512
    """Of weights that are sent or handed over at once; the learner and each server hold as much beside the model."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What happens to a server's requests while it loads weights. "in_place": they keep what was computed for them.
    "retract": it is computed anew under the new weights. "abort": they end, and are asked for again."""
    flush_cache: bool = True
    """No new request sees keys and values of older weights. False: it may; that is faster, and its logprobs are not
    quite those of its weights."""
    stream: bool = False
    """Servers started with `--incremental-streaming-output` send tokens as they sample them: what one had sent when it
    died is kept, and `status` counts what a kill would cost. Others are asked as ever."""
    max_running: Positive = 128
    """Requests decoded at once by the local engine."""
    threads: Positive = 1
    """Torch threads of the local engine and the learner on a CPU; two on a busy machine can be ten times slower."""
    quota: QuotaConfig | None = None
    """Of requests to the engine."""

    @model_validator(mode="after")
    def _addressed(self) -> Self:
        given = ["urls"] * bool(self.urls) + ["servers"] * (self.servers != ServersConfig())
        if self.kind != "sglang" and given:
            raise ValueError(f'{given[0]} are given, but kind is "{self.kind}"; write kind = "sglang"')
        fields, others = type(self).model_fields, _LOCAL_ONLY if self.kind == "sglang" else _SGLANG_ONLY
        for name in others:
            if (value := getattr(self, name)) != fields[name].default:
                raise ValueError(f'{name} = {value!r} is not for kind = "{self.kind}"; leave it out, or change kind')
        if self.weights != "disk" and not self.urls and (many := self.servers.replicated()):
            raise ValueError(
                f"servers.{many} makes replicas or pipeline stages, which take weights from disk only, but weights is "
                f'"{self.weights}"; write weights = "disk", or raise servers.count instead'
            )
        if self.placement == "colocated" and (self.kind != "sglang" or self.weights == "distributed"):
            raise ValueError(
                'placement = "colocated" is for kind = "sglang" with weights = "tensor" or "disk"; given are '
                f'kind = "{self.kind}" and weights = "{self.weights}"'
            )
        return self


class SandboxConfig(Section):
    """What isolates the code that models write. `gspo-agent doctor` shows what can be had on a machine."""

    backend: Literal["auto", "ns", "landlock", "container", "unsafe"] = "auto"
    """"auto": "ns" (namespaces), or else "landlock" (one process a job, for containers): the first whose escape cases
    all fail here. "container": "landlock" inside a container of `image`. "unsafe": nothing; every episode is marked."""
    python: str = ""
    """The interpreter of the jobs, 3.11 or newer; "": the one that runs this, or the image's."""
    image: str = ""
    """Of "container"; it has Python. Workspace tasks name their own."""
    command: str = "docker"
    """Of "container": docker, podman, or what takes their arguments."""

    @model_validator(mode="after")
    def _has_image(self) -> Self:
        if (self.backend == "container") != bool(self.image):
            raise ValueError('backend = "container" and image = "..." belong together')
        return self


class RolloutConfig(Section):
    """How episodes are sampled and grouped."""

    mode: Literal["sync", "carry_over", "async"] = "carry_over"
    """"sync": a step's groups begin after the step before it, and all of them are waited for. "carry_over": what is
    unfinished when a step has enough groups goes on under the next weights; no token is sampled while the learner
    works. "async": as carry_over, and sampling goes on while the learner works."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Episodes of one task."""
    groups_per_step: Positive = 16
    """Groups the learner gets for a step."""
    over_provision: Annotated[float, Field(ge=1.0)] = 1.25
    """Groups in flight, as a multiple of `groups_per_step`; "sync": 1. Where half of a step's episodes or fewer have a
    place, 1.25 is small: lengths are long-tailed, and the more groups in flight, the less the slowest episode costs."""
    max_in_flight: Positive | None = None
    """Episodes played at once; the others wait for a place. None: as many as the groups in flight have."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The learner scores at the same temperature."""
    max_attempts: Positive = 3
    """Times a slot is tried when environment, engine or sandbox fail."""
    min_group: Annotated[int, Field(ge=2)] = 2
    """Fewest scored members with which a group is still used once its slots are out of attempts."""
    filter_zero_variance: bool = True
    """Leave out groups whose rewards are all equal; they have no advantage."""
    max_filtered: Annotated[float, Field(ge=0)] = 3.0
    """Filtered groups allowed for one step, as a multiple of `groups_per_step`; past it they are trained on."""
    max_weight_lag: Positive = 8
    """The most that a training step may be ahead of the weights that sampled a token (fresh tokens: 1)."""
    expired: Literal["mask", "reroll", "keep"] = "mask"
    """What happens to older tokens. "mask": they leave ratio, length and gradient. "reroll": the episodes that have
    some are played again, up to `max_attempts`, then masked. "keep": they are trained on."""
    journal_tokens: Positive = 256
    """Sampled tokens of one request that a `kill -9` may cost."""
    max_failed: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed episodes among the last 200 at which the run stops and prints the first cause."""


class ColdStart(Section):
    """A small model made here: Qwen3's architecture and chat format, and a short supervised start on the
    demonstrations of the (first) environment. Cached by everything it depends on."""

    hidden_size: Positive = 128
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 2
    ffn_size: Positive = 256
    vocab_size: Positive = 1024
    context_tokens: Positive = 2048
    demonstrations: Positive = 6000
    batch_size: Positive = 32
    steps: Positive = 1100
    lr: Annotated[float, Field(gt=0)] = 3e-3
    seed: Seed | None = None
    """None: the run's seed."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        # Rotary positions turn the two halves of a head against each other.
        for whole, of, part in (
            (self.hidden_size, "hidden_size", 2 * self.heads),
            (self.heads, "heads", self.kv_heads),
        ):
            if whole % part:
                times = "2 * heads" if of == "hidden_size" else "kv_heads"
                raise ValueError(f"{of} {whole} is no multiple of {times} = {part}")
        return self


class RunConfig(Section):
    """The run directory and how often things are kept."""

    dir: Directory
    """Journal, checkpoints, curve and metrics; the same line with the same directory goes on."""
    steps: Annotated[int, Field(ge=0)] = 100
    """Training steps in all, over every restart."""
    seed: Seed = 0
    checkpoint_every: Positive = 1
    keep_checkpoints: Positive = 2
    durability: Literal["process", "power"] = "process"
    """"process": a `kill -9` loses nothing that was committed. "power": neither does a power cut."""
    keep_steps: Annotated[int, Field(ge=0)] | Literal["all"] = 20
    """Steps whose episodes stay in the journal after they were trained on; what a kept checkpoint needs stays too."""
    export: bool = False
    """Write episodes to `episodes/*.parquet` in the run directory before they leave the journal."""
    grace: Seconds = 2.0
    """How long after SIGTERM running tools may still end; choose a little less than what the scheduler gives. Ctrl-C
    leaves within two seconds whatever this is."""
    watchdog: Seconds = 300.0
    """A stage (tokens, tools, judges, journal, learner) that has work and stands still for this long is named."""


class EvalConfig(Section):
    """Held-out tasks, before, during and after training."""

    split: str = "test"
    episodes: Annotated[int, Field(ge=0)] = 200
    """Held-out tasks; 0 switches evaluation off."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only before the first and after the last."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    pass_threshold: float = 1.0
    """The reward from which an episode counts as passed."""


def _sections(envs: Any) -> Any:
    if isinstance(envs, dict):
        raise ValueError("there may be several environments: write [[env]], with two brackets")
    return envs


def _one_env(envs: list[EnvConfig]) -> list[EnvConfig]:
    if not envs:
        raise ValueError("at least one [[env]] is needed")
    return envs


class Config(Section):
    """A whole run."""

    model: Annotated[str, Field(min_length=1)]
    """A directory or hub name of a causal language model; "tiny" makes one as [cold_start] says."""
    env: Annotated[list[EnvConfig], BeforeValidator(_sections), AfterValidator(_one_env)]
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    run: RunConfig
    evaluation: EvalConfig = EvalConfig()
    cold_start: ColdStart = ColdStart()
    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base_dir(self) -> Path:
        """The folder that relative task files are looked up in first."""
        return self._base_dir

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        rollout = self.rollout
        if rollout.min_group > rollout.group_size:
            raise ValueError(f"rollout.min_group {rollout.min_group} is above group_size {rollout.group_size}")
        if self.engine.placement == "colocated" and rollout.mode == "async":
            raise ValueError(
                'rollout.mode "async" samples while the learner works, and engine.placement "colocated" gives the '
                'learner the memory for that; write rollout.mode = "carry_over" or engine.placement = "separate"'
            )
        return self

    @model_validator(mode="after")
    def _adapter_from_disk(self) -> Self:
        engine = self.engine
        if self.learner.lora is not None and (engine.weights != "disk" or engine.placement != "separate"):
            raise ValueError(
                f"learner.lora: servers take adapters from disk, and beside the learner; given are engine.weights = "
                f'"{engine.weights}" and engine.placement = "{engine.placement}"; leave both out'
            )
        if self.learner.lora is not None and engine.servers.dp > 1:
            raise ValueError(
                f"learner.lora: servers.dp = {engine.servers.dp} makes replicas, which load no adapters; raise "
                "servers.count instead"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Config:
        """Reads a TOML file; `overrides` are `section.key=value`, values as in TOML (bare words are strings)."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise ConfigError(f"no configuration file {str(path)!r}; examples are in examples/") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{path}: not readable as TOML: {error}") from None
        for override in overrides:
            override_key(data, override)
        config = cls.parse(data, source=str(path))
        config._base_dir = Path(path).resolve().parent
        return config

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "config") -> Config:
        """Checks a plain mapping; raises ConfigError with one line per problem."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(
                "\n".join(explain(cls, problem, source, LOSS_SECTIONS) for problem in error.errors())
            ) from None

    def override(self, overrides: Iterable[str]) -> Config:
        """The same configuration with `key=value` changes."""
        data = self.model_dump(mode="json")
        for override in overrides:
            override_key(data, override)
        config = Config.parse(data, source="configuration")
        config._base_dir = self._base_dir
        return config

    def identity(self) -> dict[str, Any]:
        """What may not change between two starts of one run directory."""
        # The model's making, the environments and the group size decide what journaled episodes mean.
        made = self.cold_start.model_dump(mode="json") if self.model == "tiny" else None
        return {
            "model": self.model,
            "cold_start": made,
            "env": [env.id for env in self.env],
            "lora": None if self.learner.lora is None else self.learner.lora.model_dump(mode="json"),
            "group_size": self.rollout.group_size,
            "seed": self.run.seed,
        }
