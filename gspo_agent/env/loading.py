"""From the id in a configuration to environments: load_env and EnvFactory."""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import logging
import os
import random
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any, cast

import gymnasium

from gspo_agent.config import EnvConfig
from gspo_agent.entry_points import ENVS, load_entry_point
from gspo_agent.env.contract import Env
from gspo_agent.env.options import accepted, check_names, check_options
from gspo_agent.env.shared import CLOSE_SECONDS, Shared
from gspo_agent.env.threads import Lane
from gspo_agent.env.tool_env import ToolEnv
from gspo_agent.env.wrapper import TextEnv
from gspo_agent.errors import ConfigError, EnvError, boundary
from gspo_agent.messages import Message
from gspo_agent.quota import Quota

_log = logging.getLogger(__name__)
LEFTOVERS_SECONDS = 300.0
_NUM_SEEDS = {"train": 100_000, "test": 10_000}
_FIRST_SEED = {"train": 0, "test": 1_000_000}


def load_env(id: str) -> Callable[..., Any]:
    """What makes the environment `id`: an entry point of the group gspo_agent.envs, "module:Class", or a registered
    Gymnasium id. Raises ConfigError with the nearest right name."""
    known = {point.name: point for point in entry_points(group=ENVS)}
    if id in known:
        return load_entry_point(known[id])
    module, colon, name = id.partition(":")
    if colon:
        found = _import(module, id)
        if name.replace(".", "").isidentifier():
            return _attribute(found, name, id)
        id = name  # Gymnasium's own "module:Id-v0": importing registered it
    if id in gymnasium.registry:
        return _load_registered(id)
    raise ConfigError(f"no environment {id!r}; {_suggest(id, [*known, *gymnasium.registry])}")


def register_entry_points() -> None:
    """Makes the ids of the group known to gymnasium.make; imports none of them."""
    for point in entry_points(group=ENVS):
        if point.name not in gymnasium.registry:
            gymnasium.register(point.name, entry_point=point.value)


class EnvFactory:
    """Makes the instances of one `[[env]]` section.

    >>> factory = EnvFactory(EnvConfig(id="gspo_agent/Calculator-v0", options={"flaky": 0.3}))
    >>> env = factory.create()
    """

    def __init__(self, config: EnvConfig, env: type[Any] | Callable[..., Any] | None = None) -> None:
        self.config = config
        self._make: Callable[..., Any] = load_env(config.id) if env is None else env
        kind: Any = self._make.func if isinstance(self._make, functools.partial) else self._make
        self.env_type: type[Any] | None = kind if inspect.isclass(kind) else None
        """The class, where there is one; a Gymnasium id with wrappers, or a function, has none."""
        self._ours: type[Env] | None = None
        if self.env_type is not None:
            if not issubclass(self.env_type, gymnasium.Env):
                raise ConfigError(f"{config.id} is {kind.__module__}.{kind.__qualname__}, which is no gymnasium.Env")
            check_options(self._make, config.options, f"env {config.id}")
            self._ours = self.env_type if issubclass(self.env_type, Env) else None
            if config.rewards and self._ours is None:
                raise ConfigError(
                    f"env {config.id}: `rewards` needs named components; a plain Gymnasium reward has none"
                )
        self._quotas = {
            name: Quota(quota.rate, quota.period, quota.concurrency, f"the quota of {name!r}")
            for name, quota in config.quotas.items()
        }
        if self._ours is not None:
            known = self._ours.limited_names()
        else:
            known = None if self.env_type is None else Env.limited_names()
        if known is not None:
            check_names(self._quotas, known, f"env {config.id}: quotas: nothing here is called")
        shares = self._ours is not None and issubclass(self._ours, ToolEnv)
        self._shared = Shared(self._ours, config.options) if shares else None

    def create(self) -> Env:
        """A fresh instance; what is not ours, or wrapped, comes back as a TextEnv."""
        options = self.config.options
        if self.env_type is not None and self._ours is None:
            env: Env = TextEnv(functools.partial(self._make, **options), self.config.id)
        else:
            with boundary(EnvError, f"{self.config.id}: constructor"):
                made = self._make(**options)
            env = made if isinstance(made, Env) else TextEnv(lambda: made, self.config.id)
        if self.config.rewards is not None:
            env.reward_weights = dict(self.config.rewards)
        env._limit(self._quotas)
        if isinstance(env, ToolEnv) and self._shared is not None:
            env._share(self._shared)
        return env

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | Iterable[dict[str, Any]] | None:
        """The environment's own tasks of `split`; for plain Gymnasium environments, seeds."""
        if self._ours is None:
            first = _FIRST_SEED.get(split, 2_000_000)
            return _Seeds(range(first, first + _NUM_SEEDS.get(split, 10_000)))
        with boundary(EnvError, f"{self.config.id}: tasks({split!r})"):
            return self._ours.tasks(split, **accepted(self._ours.tasks, self.config.options))

    def task_check(self) -> Callable[[dict[str, Any]], Any] | None:
        """The environment's own `check_task` with its options; None where it has none."""
        if self._ours is None or self._ours.check_task.__func__ is vars(Env)["check_task"].__func__:  # type: ignore[attr-defined]
            return None
        hook = self._ours.check_task
        return functools.partial(hook, **accepted(hook, self.config.options))

    def demonstration(self, rng: random.Random, progress: float) -> tuple[list[Message], list[dict[str, Any]]]:
        """One conversation for a cold start. Raises ConfigError where the environment gives none."""
        give = None if self._ours is None else self._ours.demonstration
        if give is None or getattr(give, "__func__", give) is vars(Env)["demonstration"].__func__:
            raise ConfigError(
                f"env {self.config.id}: a cold start needs its classmethod demonstration(rng, progress), which "
                "envs/calculator.py shows; or set model to a directory or hub name"
            )
        with boundary(EnvError, f"{self.config.id}: demonstration"):
            return give(rng, progress, **accepted(give, self.config.options))

    async def open(self) -> None:
        """Opens what the episodes share now, instead of at the first reset."""
        if self._shared is not None:
            await self._shared.get()

    async def destroy_leftovers(self, run_id: str, living: Collection[str], seconds: float = LEFTOVERS_SECONDS) -> None:
        """What the environment's own hook of that name does, in a thread where it is synchronous.

        Nobody waits longer than `seconds` for it: what it has not destroyed by then is left to the next start.
        """
        if self._ours is None:
            return
        hook = self._ours.destroy_leftovers
        try:
            async with asyncio.timeout(seconds):
                with boundary(EnvError, f"{self.config.id}: destroy_leftovers"):
                    call = functools.partial(hook, run_id, living, **accepted(hook, self.config.options))
                    await (call() if inspect.iscoroutinefunction(hook) else Lane().run(call))
        except TimeoutError:
            _log.warning(
                "%s: destroy_leftovers takes longer than %g s; the run begins without it. See what hangs there, and "
                "destroy by hand what belongs to run %s and to none of its episodes",
                self.config.id, seconds, run_id,
            )  # fmt: skip

    async def aclose(self, seconds: float = CLOSE_SECONDS) -> None:
        """Closes what the episodes shared; nobody waits longer than `seconds` for it."""
        if self._shared is not None:
            await self._shared.close(seconds)


class _Seeds(Sequence[dict[str, Any]]):
    def __init__(self, seeds: range) -> None:
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, index: Any) -> Any:
        return _Seeds(self._seeds[index]) if isinstance(index, slice) else {"seed": self._seeds[index]}


def _import(module: str, id: str) -> Any:
    # A console script does not look into the directory it is started from; after everything else, this does.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(f"{id}: importing {module} failed: {error}") from error
        raise ConfigError(
            f"{id}: no module {error.name!r} in {os.getcwd()} or on sys.path; write module:Class of a file that is"
        ) from None
    except Exception as error:
        raise ConfigError(f"{id}: importing {module} failed: {type(error).__name__}: {error}") from error


def _attribute(module: Any, name: str, id: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            candidates = [key for key, value in vars(found).items() if callable(value)]
            raise ConfigError(f"{id}: {module.__name__} has no {part!r}; {_suggest(part, candidates)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{id} is {found!r:.60}, which makes no environment")
    return cast(Callable[..., Any], found)


def _load_registered(id: str) -> Callable[..., Any]:
    spec = gymnasium.registry[id]
    point = spec.entry_point
    try:
        made = (
            _attribute(importlib.import_module(point.split(":")[0]), point.split(":")[1], id)
            if isinstance(point, str)
            else point
        )
    except ImportError as error:
        raise ConfigError(f"{id} is registered as {point}: {error}") from error
    if inspect.isclass(made) and issubclass(made, Env) and not spec.additional_wrappers:
        return functools.partial(made, **spec.kwargs) if spec.kwargs else made
    return functools.partial(gymnasium.make, id, disable_env_checker=True)


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    lower = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    if near:
        return f"did you mean {lower[near[0]]!r}?"
    return f"known here: {', '.join(names[:8]) or 'none'}; or write module:Class"
