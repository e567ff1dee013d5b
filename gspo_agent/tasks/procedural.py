"""Tasks that are made on demand, without end: the data sets of `reasoning-gym`."""

from __future__ import annotations

import difflib
import functools
import hashlib
from typing import Any

from gspo_agent.errors import TaskError, boundary

_PART = 500
"""Questions a data set is made for at once: its own default. Some make, or count, all of them beforehand."""
_REFUSED = {"codeio": "it runs the code of its rows in this process, and answers differently each time"}


class Procedural:
    """One data set of reasoning-gym, without end.

    A task is {"question", "answer", "problem", "gold", "dataset", "seed", "index"}. The last three make the whole entry
    again (`entry_of`), whose metadata JSON could not hold; with it the data set's own scorer judges (`score_answer`).
    """

    def __init__(self, name: str, seed: int, split: str) -> None:
        self.name = name
        digest = hashlib.sha256(f"{seed}/{split}".encode()).digest()
        self._seed = int.from_bytes(digest[:4], "big") >> 1  # splits and seeds share no stretch of questions
        _dataset(name, self._seed)

    def __getitem__(self, cursor: int) -> dict[str, Any]:
        part, index = divmod(cursor, _PART)
        place = {"dataset": self.name, "seed": self._seed + part * _PART, "index": index}
        entry = entry_of(place)
        question, answer = str(entry["question"]), str(entry["answer"] if entry["answer"] is not None else "")
        return {"question": question, "answer": answer, "problem": question, "gold": answer, **place}


def entry_of(task: dict[str, Any]) -> dict[str, Any]:
    """The entry that a task of `reasoning_gym:NAME` was made from."""
    dataset = _dataset(task["dataset"], task["seed"])
    with boundary(TaskError, f"reasoning_gym:{task['dataset']}: question {task['index']} of seed {task['seed']}"):
        return dict(dataset[task["index"]])


def score_answer(task: dict[str, Any], answer: str) -> float:
    """What the data set's own scorer gives for `answer`, from 0 to 1."""
    return float(_dataset(task["dataset"], task["seed"]).score_answer(answer, entry=entry_of(task)))


@functools.lru_cache(maxsize=8)
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
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)}, such as {min(DATASETS)!r}"
        raise TaskError(f"reasoning_gym:{name}: no such data set; {hint}")
    if name in _REFUSED:
        raise TaskError(f"reasoning_gym:{name} is not offered: {_REFUSED[name]}; choose another data set")
    with boundary(TaskError, f"reasoning_gym:{name} cannot be made with its defaults; choose another data set"):
        return reasoning_gym.create_dataset(name, seed=seed, size=_PART)
