import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_agent.errors import TaskError
from gspo_agent.tasks import TaskSource, entry_of, score_answer
from gspo_agent.tasks.rows import read_path

DATA = Path(__file__).parents[2] / "examples" / "data"


class Factory:
    """An environment with a `[env.tasks]` section and tasks of its own."""

    def __init__(self, own: Any = None, **specs: str) -> None:
        self.config = SimpleNamespace(id="my:Env", tasks=specs, bad_tasks="refuse")
        self.own = own
        self.check: Any = None

    def tasks(self, split: str) -> Any:
        return self.own(split) if callable(self.own) else self.own

    def task_check(self) -> Any:
        return self.check


def open_spec(spec: str, base_dir: Path = DATA, seed: int = 0, split: str = "train") -> TaskSource:
    return TaskSource.open(Factory(**{split: spec}), split, seed, base_dir)


def numbered(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(count)))
    return path


def test_every_epoch_has_every_task_in_its_own_order(tmp_path: Path) -> None:
    source = open_spec(numbered(tmp_path / "t.jsonl", 20).name, tmp_path)
    assert source.num_tasks == 20
    epochs = [[source.task(epoch * 20 + i)["n"] for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_cursor_means_the_same_task_in_every_life(tmp_path: Path) -> None:
    numbered(tmp_path / "t.jsonl", 20)
    first = open_spec("t.jsonl", tmp_path)
    seen = [first.task(cursor) for cursor in range(50)]
    for cursor in (49, 3, 20, 0):
        assert open_spec("t.jsonl", tmp_path).task(cursor) == seen[cursor]
    assert [open_spec("t.jsonl", tmp_path, seed=1).task(cursor) for cursor in range(20)] != seen[:20]


def test_a_task_that_is_changed_by_its_user_stays_as_it_was(tmp_path: Path) -> None:
    source = open_spec(str(numbered(tmp_path / "t.jsonl", 1)), tmp_path)
    source.task(0)["n"] = "changed"
    assert source.task(0) == {"n": 0}


def test_files_are_found_beside_the_configuration_and_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    numbered(tmp_path / "b" / "t.jsonl", 3)
    monkeypatch.chdir(tmp_path / "b")
    assert open_spec("t.jsonl", tmp_path / "a").num_tasks == 3
    numbered(tmp_path / "a" / "t.jsonl", 5)
    assert open_spec("t.jsonl", tmp_path / "a").num_tasks == 5
    with pytest.raises(TaskError, match=r"no task file 'u.jsonl' in .*a nor in .*b"):
        open_spec("u.jsonl", tmp_path / "a")


def test_json_arrays_gzip_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"n": 1}, {"n": 2}]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"n": 3}\n\n{"n": 4}'))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.json").write_text('{"n": 5}')
    (tmp_path / "README.md").write_text("no task")
    assert [row["n"] for _, row in read_path(tmp_path)] == [1, 2, 3, 4, 5]
    assert open_spec(".", tmp_path).num_tasks == 5


def test_all_bad_rows_are_listed_up_to_twenty(tmp_path: Path) -> None:
    lines = ['{"question": "q", "answer": "#### 1"}', "{", "[1]", '{"question": "q"}', '{"answer": "#### 1"}', "\xff"]
    (tmp_path / "bad.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(TaskError) as refusal:
        open_spec("gsm8k:bad.jsonl", tmp_path)
    said = str(refusal.value).splitlines()
    assert [line.removeprefix(f"{tmp_path}/").split(": ")[:2] for line in said] == [
        ["bad.jsonl:2", "row"],
        ["bad.jsonl:3", "row"],
        ["bad.jsonl:4", "answer"],
        ["bad.jsonl:5", "question"],
        ["bad.jsonl:6", "row"],
        [
            "gsm8k:bad.jsonl",
            '5 of 6 rows cannot be used; mend or remove them, or write bad_tasks = "drop" in the [[env]] section',
        ],
    ]
    (tmp_path / "worse.jsonl").write_text("{\n" * 25)
    with pytest.raises(TaskError) as refusal:
        open_spec("worse.jsonl", tmp_path)
    assert str(refusal.value).count("is not JSON") == 20
    assert "\n... and 5 more\nworse.jsonl: 25 of 25 rows cannot be used; mend" in str(refusal.value)


def test_rows_that_the_environment_cannot_use_are_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def even(task: dict[str, Any]) -> None:
        if task["n"] % 2:
            raise ValueError(f"{task['n']} is odd")

    numbered(tmp_path / "t.jsonl", 5)
    factory = Factory(train="t.jsonl")
    factory.check = even
    with pytest.raises(
        TaskError, match=r"t.jsonl:2: task: 1 is odd\n.*t.jsonl:4: task: 3 is odd\nt.jsonl: 2 of 5 rows"
    ):
        TaskSource.open(factory, "train", 0, tmp_path)
    factory.config.bad_tasks = "drop"
    source = TaskSource.open(factory, "train", 0, tmp_path)
    assert sorted(source.task(cursor)["n"] for cursor in range(3)) == [0, 2, 4]
    assert "t.jsonl:4: task: 3 is odd\nt.jsonl: 2 of 5 rows cannot be used, and are left out" in caplog.text
    (tmp_path / "t.jsonl").write_text('{"n": 1}')
    with pytest.raises(TaskError, match=r"1 of 1 rows cannot be used; mend or remove them$"):
        TaskSource.open(factory, "train", 0, tmp_path)


def test_empty_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TaskError, match=r"empty.jsonl: holds no tasks"):
        open_spec("empty.jsonl", tmp_path)
    (tmp_path / "lines.json").write_text('{"n": 1}\n{"n": 2}')
    with pytest.raises(TaskError, match=r"name the file .jsonl if it holds one object per line"):
        open_spec("lines.json", tmp_path)
    (tmp_path / "x.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(TaskError, match="cannot be read"):
        open_spec("x.jsonl.gz", tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(TaskError, match=r"no .jsonl or .*file in this folder"):
        open_spec("folder", tmp_path)


def test_a_mistyped_format_is_answered_with_the_nearest() -> None:
    with pytest.raises(TaskError, match=r"unknown format 'humanevl'; did you mean 'humaneval'\?"):
        open_spec("humanevl:humaneval.jsonl")
    with pytest.raises(TaskError, match="unknown format 'zzz'; known are humaneval, mbpp"):
        open_spec("zzz:humaneval.jsonl")
    with pytest.raises(TaskError, match=r"no task file 'nowhere.jsonl'"):
        open_spec("humaneval:nowhere.jsonl")


def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (DATA / "gsm8k.jsonl").read_text().splitlines()]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    source = open_spec("gsm8k:saved", tmp_path)
    assert sorted(source.task(cursor)["gold"] for cursor in range(2)) == ["1,000", "23"]
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(TaskError, match="holds the splits train"):
        open_spec("gsm8k:dict", tmp_path)


def test_a_data_set_that_cannot_be_loaded_says_how_to_write_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        TaskError, match=r"nobody/nothing:main@train: no such file, .*write a path, or NAME:CONFIG@SPLIT"
    ):
        open_spec("gsm8k:nobody/nothing:main@train", tmp_path)


def test_an_environment_without_tasks_is_told_what_to_write() -> None:
    with pytest.raises(
        TaskError, match=r"env my:Env: no tasks for split 'test'; \[env.tasks\] has train; write tasks.test"
    ):
        TaskSource.open(Factory(train="x"), "test", 0, DATA)


def test_an_environments_sequence_is_read_by_index() -> None:
    class Squares:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> dict[str, int]:
            assert 0 <= index < 10**12
            return {"n": index}

    source = TaskSource.open(Factory(Squares()), "train", 0, DATA)
    assert source.num_tasks == 10**12
    seen = [source.task(cursor)["n"] for cursor in range(100)]
    assert len(set(seen)) == 100
    assert seen == [TaskSource.open(Factory(Squares()), "train", 0, DATA).task(cursor)["n"] for cursor in range(100)]
    assert source.task(10**12)["n"] != seen[0]


def test_an_endless_generator_is_read_in_order_and_again_after_a_restart() -> None:
    def tasks(split: str) -> Iterator[dict[str, Any]]:
        return ({"n": n, "split": split} for n in itertools.count())

    source = TaskSource.open(Factory(tasks), "train", 0, DATA)
    assert source.num_tasks is None
    assert [source.task(cursor)["n"] for cursor in (0, 1, 1, 7, 3, 8)] == [0, 1, 1, 7, 3, 8]
    assert TaskSource.open(Factory(tasks), "train", 0, DATA).task(5) == {"n": 5, "split": "train"}


def test_a_generator_that_ends_becomes_finite() -> None:
    def tasks(split: str) -> Iterator[dict[str, Any]]:
        return ({"n": n} for n in range(6))

    source = TaskSource.open(Factory(tasks), "train", 0, DATA)
    seen = [source.task(cursor)["n"] for cursor in range(18)]
    assert source.num_tasks == 6
    assert [sorted(seen[start : start + 6]) for start in (0, 6, 12)] == [list(range(6))] * 3
    late = TaskSource.open(Factory(tasks), "train", 0, DATA)
    assert [late.task(cursor)["n"] for cursor in (17, 6, 12)] == [seen[17], seen[6], seen[12]]
    with pytest.raises(TaskError, match="holds no tasks"):
        TaskSource.open(Factory(lambda split: iter(())), "train", 0, DATA).task(0)


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(TaskError, match=r"my:Env: tasks\('train'\): task 0 is str, not a dict"):
        TaskSource.open(Factory(["a"]), "train", 0, DATA).task(0)
    with pytest.raises(ValueError, match="cursor -1 is negative"):
        TaskSource.open(Factory([{}]), "train", 0, DATA).task(-1)


def test_reasoning_gym_makes_tasks_without_end_that_its_own_scorer_judges() -> None:
    pytest.importorskip("reasoning_gym")
    source = open_spec("reasoning_gym:leg_counting")
    assert source.num_tasks is None
    task = json.loads(json.dumps(source.task(10**6)))
    assert task == open_spec("reasoning_gym:leg_counting").task(10**6)
    assert task["question"] == task["problem"] == entry_of(task)["question"]
    assert score_answer(task, task["gold"]) == 1.0
    assert score_answer(task, "no legs") == 0.0
    held_out = open_spec("reasoning_gym:leg_counting", split="test")
    assert not {held_out.task(i)["question"] for i in range(20)} & {source.task(i)["question"] for i in range(20)}
    with pytest.raises(TaskError, match=r"no such data set; did you mean 'leg_counting'\?"):
        open_spec("reasoning_gym:leg_countin")
    with pytest.raises(TaskError, match="codeio is not offered: it runs the code of its rows"):
        open_spec("reasoning_gym:codeio")
    with pytest.raises(TaskError, match="composite cannot be made with its defaults"):
        open_spec("reasoning_gym:composite")


def test_reasoning_gym_goes_on_past_the_size_a_data_set_was_made_for() -> None:
    pytest.importorskip("reasoning_gym")
    source = open_spec("reasoning_gym:leg_counting")
    questions = [source.task(cursor)["question"] for cursor in (*range(495, 505), 995, 1000)]
    assert len(set(questions)) == 12


@pytest.mark.parametrize("value", ["\ud800", 2**70, {1, 2}, b"x", [object()]])
def test_a_task_that_the_journal_could_not_keep_is_named(value: Any) -> None:
    source = TaskSource.open(Factory([{"good": 1, "bad": value}]), "train", 0, DATA)
    with pytest.raises(TaskError, match=r"my:Env: tasks\('train'\): task 0 cannot be kept as JSON"):
        source.task(0)
