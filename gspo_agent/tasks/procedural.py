"""Tasks that are made on demand, without end: the data sets of `reasoning-gym`."""

from __future__ import annotations

import difflib
import functools
import hashlib
from typing import Any

from gspo_agent.errors import TaskError

_SIZE = 1 << 31


class Procedural:
    """One data set of reasoning-gym, without end.

    A task is {"question", "answer", "problem", "gold", "dataset", "seed", "index"}. The last three make the whole entry
    again (`entry_of`), whose metadata JSON could not hold; with it the data set's own scorer judges (`score_answer`).
    """

    def __init__(self, name: str, seed: int, split: str) -> None:
        self.name = name
        digest = hashlib.sha256(f"{seed}/{split}".encode()).digest()
        self.seed = int.from_bytes(digest[:4], "big") >> 1  # splits and seeds share no stretch of questions
        _dataset(name, self.seed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = _dataset(self.name, self.seed)[index]
        question, answer = str(entry["question"]), str(entry["answer"] if entry["answer"] is not None else "")
        place = {"dataset": self.name, "seed": self.seed, "index": index}
        return {"question": question, "answer": answer, "problem": question, "gold": answer, **place}


def entry_of(task: dict[str, Any]) -> dict[str, Any]:
    """The entry that a task of `reasoning_gym:NAME` was made from."""
    return dict(_dataset(task["dataset"], task["seed"])[task["index"]])


def score_answer(task: dict[str, Any], answer: str) -> float:
    """What the data set's own scorer gives for `answer`, from 0 to 1."""
    dataset = _dataset(task["dataset"], task["seed"])
    return float(dataset.score_answer(answer, entry=dataset[task["index"]]))


@functools.lru_cache(maxsize=32)
def _dataset(name: str, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise TaskError(
            f"reasoning_gym:{name} needs the package reasoning-gym: pip install 'gspo_agent[data]'"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)}, such as {sorted(DATASETS)[0]!r}"
        raise TaskError(f"reasoning_gym:{name}: no such data set; {hint}")
    return reasoning_gym.create_dataset(name, seed=seed, size=_SIZE)
