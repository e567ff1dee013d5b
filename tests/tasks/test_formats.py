"""The field's own formats, read from our own rows in their schemas."""

import ast
import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.errors import TaskError
from gspo_agent.sandbox.inside import data
from gspo_agent.tasks.problems import last_box
from gspo_agent.tasks.rows import convert_rows, read_path
from gspo_agent.tasks.source import FORMATS

DATA = Path(__file__).parents[2] / "examples" / "data"


def raw(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def read(name: str) -> list[dict[str, Any]]:
    return convert_rows(read_path(DATA / f"{name}.jsonl"), FORMATS[name], name)


def broken(name: str, **changes: Any) -> str:
    """What is said about the format's first row after `changes`; a change to ... removes the field."""
    row = {key: value for key, value in (raw(name)[0] | changes).items() if value is not ...}
    with pytest.raises(TaskError) as refusal:
        convert_rows(iter([("file.jsonl:7", row)]), FORMATS[name], name)
    return str(refusal.value)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_rows_of_our_own_and_gives_tasks_that_a_journal_can_hold(name: str) -> None:
    for task in read(name):
        assert json.loads(json.dumps(task, allow_nan=False)) == task
        if name in ("gsm8k", "math", "aime", "dapo"):
            assert task["problem"]
            assert task["gold"]
        else:
            assert task["prompt"]
            assert task["kind"] in ("stdio", "call", "test_code")
            assert bool(task.get("public_tests") and task.get("hidden_tests")) == (task["kind"] != "test_code")


SOLUTIONS: dict[str, Callable[..., Any]] = {
    "rotate_left": lambda items, steps: items[steps % len(items) :] + items[: steps % len(items)] if items else [],
    "span": lambda values: (min(values), max(values)) if values else None,
    "count_echoes": lambda s: sum(a == b for a, b in zip(s.split(), s.split()[1:], strict=False)),
    "shared_letters": lambda a, b: set(a) & set(b),
    "countPairs": lambda nums, t: sum(a + b == t for i, a in enumerate(nums) for b in nums[i + 1 :]),
    "without_vowels": lambda word: "".join(c for c in word if c not in "aeiou"),
    "drop": lambda xs: sorted(xs)[:-1],
}


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "livecodebench", "apps", "taco"])
def test_call_tests_are_what_a_right_function_answers(name: str) -> None:
    calls = [task for task in read(name) if task["kind"] == "call"]
    assert calls
    for task in calls:
        for test in task["public_tests"] + task["hidden_tests"]:
            args, expected = data.decode(test["args"]), data.decode(test["expected"])
            answer = SOLUTIONS[task["entry_point"]](*args)
            assert answer == expected
            assert type(answer) is type(expected)


def test_humaneval_reads_literal_asserts_and_shows_the_docstring_examples() -> None:
    rotate, span, half_life = read("humaneval")
    assert rotate["id"] == "Own/0"
    assert len(rotate["hidden_tests"]) == 4
    assert rotate["public_tests"] == [
        {"args": [[1, 2, 3, 4], 1], "expected": [2, 3, 4, 1]},
        {"args": [[], 3], "expected": []},
    ]
    assert span["hidden_tests"][0] == {"args": [[3, -1, 2]], "expected": {"$tuple": [-1, 3]}}
    assert span["public_tests"] == span["hidden_tests"][:1]
    assert half_life["kind"] == "test_code"
    assert half_life["test_code"].endswith("check(half_life)\n")
    ast.parse(half_life["test_code"])


def test_mbpp_keeps_asserts_that_no_list_of_calls_can_say() -> None:
    echoes, letters, diagonal = read("mbpp")
    assert echoes["entry_point"] == "count_echoes"
    assert len(echoes["hidden_tests"]) == 4
    assert "assert count_echoes('go go stop') == 1" in echoes["prompt"]
    assert "a a a b b" not in echoes["prompt"]
    assert [data.decode(test["expected"]) for test in letters["hidden_tests"]][1:] == [set(), {"o", "n"}]
    assert diagonal["kind"] == "test_code"
    assert diagonal["test_code"].startswith("import math\nassert math.isclose")


@pytest.mark.parametrize(
    "statement",
    [
        "assert abs(f(1) - 2) < 1e-6",
        "assert f(1)",
        "assert f(x) == 1",
        "assert f(1, k=2) == 1",
        "assert f(1) != 2",
        "assert f(1) == g(2)",
        "assert f(1) is 5",
        "assert g.f(1) == 2",
        "assert 1 < f(1) < 3",
        "assert f(1) == 1; import os",
        "for i in range(3): assert f(i) == i",
        "f(1) == 1",
        "assert f(1) ==",
        "assert f(*[1]) == 1",
    ],
)
def test_what_is_not_exactly_a_call_with_a_result_is_left_as_code(statement: str) -> None:
    row = raw("mbpp")[0] | {"test_list": ["assert f(1) == 1", statement], "challenge_test_list": []}
    task = FORMATS["mbpp"](row)
    assert task is not None
    assert task["kind"] == "test_code"
    assert statement in task["test_code"]


def test_asserts_about_two_functions_are_left_as_code() -> None:
    task = FORMATS["mbpp"](raw("mbpp")[0] | {"test_list": ["assert f(1) == 1", "assert g(1) == 1"]})
    assert task is not None
    assert task["kind"] == "test_code"


def test_livecodebench_unpacks_tests_and_knows_both_kinds() -> None:
    stairs, pairs = read("livecodebench")
    assert stairs["kind"] == "stdio"
    assert stairs["public_tests"] == [{"stdin": "2\n", "stdout": "#\n##\n"}]
    assert stairs["hidden_tests"][2] == {"stdin": "4\n", "stdout": "#\n##\n###\n####\n"}
    assert (pairs["kind"], pairs["entry_point"], pairs["cls"]) == ("call", "countPairs", "Solution")
    assert pairs["hidden_tests"][1] == {"args": [[1, 1, 1], 2], "expected": 3}
    assert "class Solution:" in pairs["prompt"]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this ran",))


def pack(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (pack(Attack()), "only text is allowed"),
        (pack(json.dumps("x"))[:-8], "neither JSON nor base64|cut off"),
        (pack([1]), "neither JSON nor base64"),
        ("@@@", "neither JSON nor base64"),
        (base64.b64encode(b"x").decode(), "cut off"),
        ("[{]", "is not JSON"),
        ('[{"input": "1"}]', "test 0 has no input and output"),
        ('[{"input": "1", "output": "2", "testtype": "x"}]', "testtype 'x'"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "mixed kinds"),
    ],
)
def test_packed_tests_that_cannot_be_read_are_named_and_never_run(
    packed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = broken("livecodebench", private_test_cases=packed)
    assert message.startswith("file.jsonl:7: p")
    assert any(part in message for part in said.split("|"))
    assert capsys.readouterr().out == ""


def test_apps_unwraps_results_only_where_every_one_is_wrapped() -> None:
    between, vowels = read("apps")
    assert between["hidden_tests"][2] == {"stdin": "9 3\n", "stdout": "5\n"}
    assert vowels["hidden_tests"][0] == {"args": ["banana"], "expected": "bnn"}
    drop = read("taco")[1]
    assert [test["expected"] for test in drop["hidden_tests"]] == [[1, 2], [], [2]]
    assert drop["cls"] == "Solution"


def test_rows_published_without_tests_are_left_out_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert len(raw("apps")) == 3
    assert len(read("apps")) == 2
    assert "1 of 3 rows have no tests" in caplog.text


def test_lines_of_text_are_joined_and_limits_read() -> None:
    packed = json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]})
    task = FORMATS["taco"](raw("taco")[0] | {"input_output": packed, "time_limit": "1.5 seconds"})
    assert task is not None
    assert task["hidden_tests"] == [{"stdin": "1\n2\n", "stdout": "3\n"}]
    assert task["time_limit"] == 1.5
    assert "time_limit" not in (FORMATS["taco"](raw("taco")[0] | {"time_limit": "no limit"}) or {})


def test_gold_answers() -> None:
    assert [task["gold"] for task in read("gsm8k")] == ["23", "1,000"]
    assert [task["gold"] for task in read("math")] == [r"\frac{5}{3}", "10", "5"]
    assert [task["gold"] for task in read("aime")] == ["401", "30", "1"]
    assert [task["gold"] for task in read("dapo")] == ["25", "11"]
    problem = "How many of the integers from 1 to 100 are divisible by 3 but not by 4?"
    assert read("dapo")[0] == {"id": "own-0", "problem": problem, "gold": "25"}
    assert read("math")[0]["subject"] == "Algebra"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a_{b_{c}}}!", "a_{b_{c}}"),
        (r"\boxed{\left\{x \right.}", r"\left\{x \right."),
        (r"\fbox{3}", "3"),
        (r"$\boxed 7$ is", "7"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        ("7", None),
    ],
)
def test_the_last_whole_box_is_the_answer(text: str, gold: str | None) -> None:
    assert last_box(text) == gold


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("humaneval", {"test": ...}, "test: is missing; the row has 'task_id'"),
        ("humaneval", {"test": "assert f() == 1"}, "test: has no function check(candidate)"),
        ("humaneval", {"entry_point": "a b"}, "entry_point: 'a b' is not a function's name"),
        ("humaneval", {"prompt": 5}, "prompt: is int, not text"),
        ("mbpp", {"text": " "}, "text: is empty"),
        ("mbpp", {"test_list": "assert f(1) == 1"}, "test_list: is str, not a list"),
        ("mbpp", {"test_list": [], "challenge_test_list": []}, "test_list: must hold asserts"),
        ("livecodebench", {"question_content": ...}, "question_content: is missing"),
        ("livecodebench", {"public_test_cases": "[]", "private_test_cases": "[]"}, "private_test_cases: no test"),
        ("apps", {"input_output": "{"}, "input_output: is not JSON"),
        ("apps", {"input_output": '{"inputs": ["1"], "outputs": []}'}, "input_output: inputs and outputs are not two"),
        ("apps", {"input_output": '{"inputs": [1], "outputs": ["1"]}'}, "input_output: inputs hold int, not text"),
        ("apps", {"input_output": '{"fn_name": "f", "inputs": ["1"], "outputs": [1]}'}, "must be lists of arguments"),
        ("gsm8k", {"answer": "It is 23."}, "answer: has no '#### result'"),
        ("gsm8k", {"answer": "It is ####"}, "answer: has no '#### result'"),
        ("math", {"solution": "It is 3."}, r"solution: has no \boxed{result}"),
        ("aime", {"answer": "1000"}, "answer: is '1000', not an integer from 0 to 999"),
        ("aime", {"answer": True}, "answer: is missing"),
        ("aime", {"answer": ...}, "answer: is missing"),
        ("dapo", {"prompt": ...}, "problem: is missing"),
        ("dapo", {"prompt": []}, "prompt: has 0 messages"),
        ("dapo", {"reward_model": ...}, "ground_truth: is missing"),
        ("dapo", {"reward_model": "{"}, "reward_model: is not JSON"),
    ],
)
def test_a_bad_row_is_named_with_line_and_field(name: str, changes: dict[str, Any], said: str) -> None:
    assert broken(name, **changes).startswith("file.jsonl:7: ")
    assert said in broken(name, **changes)


def test_functional_tests_without_a_name_are_refused() -> None:
    row = raw("livecodebench")[1] | {"metadata": "{}"}
    with pytest.raises(TaskError, match=r"f:1: metadata: has no func_name"):
        convert_rows(iter([("f:1", row)]), FORMATS["livecodebench"], "f")
