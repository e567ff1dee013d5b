"""TaskSource: the task of a cursor, the same in every life of a run."""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any, Protocol

import orjson

from gspo_agent.errors import TaskError
from gspo_agent.tasks import problems, programs
from gspo_agent.tasks.procedural import Procedural
from gspo_agent.tasks.rows import SUFFIXES, Check, Convert, convert_rows, read_hub, read_path

FORMATS: dict[str, Convert] = {
    "humaneval": programs.humaneval,
    "mbpp": programs.mbpp,
    "livecodebench": programs.livecodebench,
    "apps": programs.apps,
    "taco": programs.apps,
    "gsm8k": problems.gsm8k,
    "math": problems.math,
    "aime": problems.aime,
    "dapo": problems.dapo,
}
"""How the rows of each format become tasks."""
_PROCEDURAL = "reasoning_gym"
_MAX_SHUFFLED = 5_000_000


class Factory(Protocol):
    """What a source needs of an `EnvFactory`."""

    config: Any

    def tasks(self, split: str) -> Sequence[Any] | Iterable[Any] | None: ...

    def task_check(self) -> Check | None: ...


class TaskSource:
    """Tasks by cursor.

    Finite sources come in a new order each epoch; endless ones in their own order. A task depends on (seed, split,
    cursor) alone, so a run goes on with the next cursor and nothing else to remember.
    """

    def __init__(
        self,
        tasks: Sequence[Any] | Iterable[Any] | Procedural,
        *,
        seed: int,
        split: str,
        name: str,
        again: Callable[[], Iterable[Any] | None] | None = None,
    ) -> None:
        """`again` gives the tasks anew, for what can be read only once."""
        self.name = name
        self._seed, self._split = seed, split
        self._tasks: Any = tasks
        self._again = again or (lambda: self._tasks)
        self._stream: Iterator[Any] | None = None
        self._position = 0
        self._order: tuple[int, list[int]] = (-1, [])
        self.num_tasks: int | None = None
        """None: endless, or not counted yet."""
        if hasattr(tasks, "__len__"):
            self._finite(tasks if hasattr(tasks, "__getitem__") else list(tasks))

    @classmethod
    def open(cls, env_factory: Factory, split: str, seed: int, base_dir: Path) -> TaskSource:
        """The source that `[env.tasks]` names for `split`, or else the environment's own. Raises TaskError."""
        config = env_factory.config
        spec = config.tasks.get(split)
        if spec is not None:
            read = _read(spec, split, seed, base_dir, env_factory.task_check(), drop=config.bad_tasks == "drop")
            return cls(read, seed=seed, split=split, name=spec)
        own = env_factory.tasks(split)
        if own is None:
            given = f"; [env.tasks] has {', '.join(config.tasks)}" if config.tasks else ""
            raise TaskError(
                f"env {config.id}: no tasks for split {split!r}{given}; write tasks.{split} = 'FILE.jsonl' in its "
                f"[[env]] section, or give the environment a classmethod tasks(split)"
            )
        name = f"{config.id}: tasks({split!r})"
        return cls(own, seed=seed, split=split, name=name, again=lambda: env_factory.tasks(split))

    def task(self, cursor: int) -> dict[str, Any]:
        """The task at `cursor` >= 0."""
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is negative")
        found = self._at(cursor)
        if not isinstance(found, Mapping):
            raise TaskError(f"{self.name}: task {cursor} is {type(found).__name__}, not a dict")
        task = dict(found)
        try:
            orjson.dumps(task)
        except TypeError as error:  # the journal keeps tasks as JSON
            raise TaskError(
                f"{self.name}: task {cursor} cannot be kept as JSON: {error}; use valid text, numbers of 64 bits, "
                "lists and dicts"
            ) from None
        return task

    def _at(self, cursor: int) -> Any:
        if self.num_tasks is None and not hasattr(self._tasks, "__getitem__"):
            found = self._streamed(cursor)
            if self.num_tasks is None:
                return found
        if self.num_tasks is None:
            return self._tasks[cursor]
        return self._tasks[self._shuffled(*divmod(cursor, self.num_tasks))]

    def _finite(self, tasks: Any) -> None:
        self._tasks, self.num_tasks = tasks, len(tasks)
        if not self.num_tasks:
            raise TaskError(f"{self.name}: holds no tasks")

    def _streamed(self, cursor: int) -> Any:
        """Reads on to `cursor`, from the start where it lies behind; a stream that ends becomes finite."""
        if self._stream is None or cursor < self._position:
            self._stream, self._position = iter(self._again() or ()), 0
        for found in itertools.islice(self._stream, cursor - self._position, None):
            self._position = cursor + 1
            return found
        self._finite(list(self._again() or ()))
        return None

    def _shuffled(self, epoch: int, position: int) -> int:
        count = self.num_tasks or 0
        if count > _MAX_SHUFFLED:  # a permutation without a list of it
            generator = random.Random(f"{self._seed}/{self._split}/{epoch}")
            step = next(step for step in iter(lambda: generator.randrange(1, count), None) if gcd(step, count) == 1)
            return (generator.randrange(count) + position * step) % count
        if self._order[0] != epoch:
            order = list(range(count))
            random.Random(f"{self._seed}/{self._split}/{epoch}").shuffle(order)
            self._order = epoch, order
        return self._order[1][position]


def _read(
    spec: str, split: str, seed: int, base_dir: Path, check: Check | None, *, drop: bool
) -> Sequence[Any] | Procedural:
    prefix, colon, rest = spec.partition(":")
    if colon and prefix == _PROCEDURAL:
        return Procedural(rest, seed, split)
    if colon and prefix in FORMATS:
        path = _find(rest, base_dir)
        if path is None and (rest.endswith(SUFFIXES) or rest.startswith((".", "/", "~"))):
            raise _missing(rest, base_dir)
        rows = read_hub(rest, split) if path is None else read_path(path)
        return convert_rows(rows, FORMATS[prefix], spec, check, drop=drop)
    path = _find(spec, base_dir)
    if path is None:
        near = difflib.get_close_matches(prefix, [*FORMATS, _PROCEDURAL], n=1) if colon else []
        if colon and not prefix.endswith(SUFFIXES):
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join([*FORMATS, _PROCEDURAL])}"
            raise TaskError(f"{spec}: unknown format {prefix!r}; {hint}")
        raise _missing(spec, base_dir)
    return convert_rows(read_path(path), dict, spec, check, drop=drop)


def _find(name: str, base_dir: Path) -> Path | None:
    """Relative to the configuration's folder, then to the working directory."""
    path = Path(name).expanduser()
    return next((place for place in (base_dir / path, path) if place.exists()), None)


def _missing(name: str, base_dir: Path) -> TaskError:
    return TaskError(f"no task file {name!r} in {base_dir} nor in {Path.cwd()}")
