"""The coding agent's environment and its procedural tasks, run in the real sandbox."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from envs.code_sandbox import CodeSandbox, Compositions
from envs.code_sandbox.compositions import OPERATIONS, compositions, draw, program
from gspo_agent.config import EnvConfig
from gspo_agent.env import EnvFactory, check_env
from gspo_agent.errors import EnvError, Unscored
from gspo_agent.messages import Message, assistant, call
from gspo_agent.tasks import TaskSource

DATA = Path(__file__).parents[2] / "examples" / "data"

DOUBLE = "def f(x):\n    return 2 * x\n"
SQUARE = "def f(x):\n    return x * x\n"
TASK = {
    "prompt": "Double or square x.",
    "kind": "call",
    "entry_point": "f",
    "public_tests": [{"args": [2], "expected": 4}, {"args": [3], "expected": 6}],
    "hidden_tests": [{"args": [77123], "expected": 154246}],
    "time_limit": 1.0,
}


def write(code: str) -> Message:
    return assistant("", [call("write", code=code)])


TEST, DONE = assistant("", [call("test")]), assistant("Done.")


async def play(
    env: CodeSandbox, task: dict[str, Any], *actions: Message
) -> tuple[list[str], float, dict[str, Any], bool]:
    """The tools' results, the last reward and info, and whether the episode ended."""
    await env.areset(seed=0, options={"task": task})
    results: list[str] = []
    for action in actions:
        messages, reward, terminated, _, info = await env.astep(action)
        results += [message["content"] for message in messages]
    return results, reward, info, terminated


async def test_a_failed_test_says_what_is_wrong_and_a_rewrite_passes_the_hidden_tests() -> None:
    results, reward, info, ended = await play(CodeSandbox(), TASK, write(SQUARE), TEST, write(DOUBLE), TEST, DONE)
    assert results == ["written", "failed: f(3)\ngot 9\nexpected 6", "written", "passed"]
    assert ended
    assert reward == 1.0
    assert info["metrics"] == {
        "tested": 1.0, "tested_before_finish": 1.0, "finished_on_passed": 1.0, "test_runs": 2.0, "corrections": 1.0,
    }  # fmt: skip


async def test_untested_and_unwritten_programs_are_judged_by_the_hidden_tests_alone() -> None:
    _, reward, info, _ = await play(CodeSandbox(), TASK, write(SQUARE), DONE)
    assert (reward, info["metrics"]["tested_before_finish"]) == (0.0, 0.0)
    _, reward, info, _ = await play(CodeSandbox(), TASK, write(SQUARE), TEST, write(DOUBLE), DONE)
    assert (reward, info["metrics"]["tested"], info["metrics"]["tested_before_finish"]) == (1.0, 1.0, 0.0)
    results, reward, _, _ = await play(CodeSandbox(), TASK, TEST, DONE)
    assert (results, reward) == (["nothing is written yet; call write first"], 0.0)


async def test_a_program_that_knows_only_the_visible_tests_fails() -> None:
    results, reward, _, _ = await play(CodeSandbox(), TASK, write("f = {2: 4, 3: 6}.get\n"), TEST, DONE)
    assert (results[-1], reward) == ("passed", 0.0)


async def test_an_edit_replaces_a_part_that_is_there_once() -> None:
    edit = assistant("", [call("edit", old="x * x", new="2 * x")])
    results, reward, info, _ = await play(CodeSandbox(), TASK, write(SQUARE), TEST, edit, TEST, DONE)
    assert results[2:] == ["edited", "passed"]
    assert (reward, info["metrics"]["corrections"]) == (1.0, 1.0)
    for old, times in (("x + x", 0), ("", 0), ("x", 3)):
        edit = assistant("", [call("edit", old=old, new="y")])
        results, _, info, _ = await play(CodeSandbox(), TASK, write(SQUARE), TEST, edit, DONE)
        assert f"{times} times" in results[2]
        assert (info["metrics"]["corrections"], info["metrics"]["tested_before_finish"]) == (0.0, 1.0)


async def test_a_limit_of_the_runner_scores_what_is_written() -> None:
    env = CodeSandbox()
    await play(env, TASK, write(DOUBLE))
    reward, info = await env.afinish("turns")
    assert (reward, info["metrics"]["tested"]) == (1.0, 0.0)


async def test_programs_on_standard_input() -> None:
    task = {
        "prompt": "Print the sum.",
        "kind": "stdio",
        "public_tests": [{"stdin": "1 2\n", "stdout": "3\n"}],
        "hidden_tests": [{"stdin": "5 6\n", "stdout": "11\n"}],
    }
    right = "print(sum(map(int, input().split())))\n"
    results, reward, _, _ = await play(CodeSandbox(), task, write("print(0)\n"), TEST, write(right), TEST, DONE)
    assert results[1] == "failed on the input:\n1 2\ngot:\n0\nexpected:\n3"
    assert (results[3], reward) == ("passed", 1.0)


async def test_programs_against_test_files() -> None:
    file = (
        "import pytest\nfrom solution import f\n\n"
        "@pytest.mark.parametrize('x', [0, 3])\ndef test_f(x): assert f(x) == 2 * x\n"
    )
    hidden = "from solution import f\ndef test_f(): assert f(77123) == 154246\n"
    task = {
        "prompt": "Double or square x.",
        "kind": "testfile",
        "public_tests": [{"test_file": file, "count": 2}],
        "hidden_tests": [{"test_file": hidden, "count": 1}],
    }
    results, reward, _, _ = await play(CodeSandbox(), task, write(SQUARE), TEST, write(DOUBLE), TEST, DONE)
    assert results[1].startswith("failed: wrong answer\n")
    assert "assert 9 == (2 * 3)" in results[1]
    assert (results[3], reward) == ("passed", 1.0)
    results, reward, _, _ = await play(CodeSandbox(), task, write("f = {0: 0, 3: 6}.get"), TEST, DONE)
    assert (results[1], reward) == ("passed", 0.0)
    assert "154246" not in str(results)


async def test_errors_and_floods_are_shown_cut_and_without_control_characters() -> None:
    results, _, _, _ = await play(CodeSandbox(), TASK, write("def f(x):\n    raise KeyError('no \x1b[31mred')\n"), TEST)
    assert "KeyError" in results[1]
    assert "\x1b" not in results[1]
    results, _, _, _ = await play(
        CodeSandbox(), TASK, write("def f(x):\n    return 'head' + 'x' * 10**6 + 'tail'\n"), TEST
    )
    assert len(results[1]) < 3000
    assert all(part in results[1] for part in ("head", "left out", "tail"))
    results, _, _, _ = await play(CodeSandbox(), TASK, write("def f(x) return x"), TEST)
    assert "SyntaxError" in results[1]


async def test_hidden_tests_are_in_nothing_that_the_model_or_the_program_can_read() -> None:
    spy = (
        "import gc, os, sys\n"
        "def f(x):\n"
        "    seen = repr([o for o in gc.get_objects() if isinstance(o, (str, list, dict))]) + repr(os.environ)\n"
        "    raise RuntimeError(str(77000 + 123) in seen or str(154000 + 246) in seen)\n"
    )
    env = CodeSandbox()
    messages, _ = await env.areset(seed=0, options={"task": TASK})
    results, _, info, _ = await play(env, TASK, write(spy), TEST, DONE)
    assert "RuntimeError: False" in results[1]
    shown = json.dumps([messages, results, info, env.tool_schemas])
    assert "77123" not in shown
    assert "154246" not in shown


@pytest.mark.parametrize(
    "code",
    [
        "for path in ('reward.txt', '/tmp/reward.txt', 'result.json'):\n"
        "    with open(path, 'w') as file:\n        file.write('1.0')\n" + SQUARE,
        "def f(x):\n    return float('nan')\n",
        "def f(x):\n    return float('inf')\n",
        "class Same(int):\n    __eq__ = lambda a, b: True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return Same(5)\n",
        "import os\nprint('passed')\nprint('1.0')\nos._exit(0)\n",
        "import sys\ndef f(x):\n    sys.exit(0)\n",
        "def f(x):\n    raise AssertionError('passed')\n",
    ],
)
async def test_what_a_program_writes_prints_or_pretends_is_no_reward(code: str) -> None:
    _, reward, info, ended = await play(CodeSandbox(), TASK, write(code), TEST, DONE)
    assert ended
    assert reward == 0.0
    assert all(math.isfinite(value) for value in (reward, *info["components"].values()))


async def test_broken_tests_and_tasks_are_never_reward_zero_and_name_no_content() -> None:
    broken = {**TASK, "hidden_tests": [{"args": 77123, "expected": 1}]}
    with pytest.raises(Unscored) as unscored:
        await play(CodeSandbox(), broken, write(DOUBLE), DONE)
    assert "task_error" in str(unscored.value)
    assert "77123" not in str(unscored.value)
    for field, value in (("hidden_tests", []), ("kind", "haskell"), ("entry_point", None)):
        with pytest.raises(EnvError, match=field):
            await CodeSandbox().areset(options={"task": {**TASK, field: value}})


async def test_an_episode_goes_on_in_another_instance_from_its_state() -> None:
    first, second = CodeSandbox(), CodeSandbox()
    await play(first, TASK, write(SQUARE), TEST)
    second.set_state(json.loads(json.dumps(first.get_state())))
    await second.astep(write(DOUBLE))
    _, reward, _, _, info = await second.astep(DONE)
    assert (reward, info["metrics"]["corrections"], info["metrics"]["test_runs"]) == (1.0, 1.0, 1.0)


async def test_demonstrations_are_what_the_environment_would_have_answered() -> None:
    for number in range(24):
        messages, schemas = CodeSandbox.demonstration(random.Random(number), number / 24)
        puzzle = draw(random.Random(number), compositions("train")).task()
        env = CodeSandbox()
        answered, reward, _, ended = await play(env, puzzle, *[m for m in messages if m["role"] == "assistant"])
        assert answered == [message["content"] for message in messages if message["role"] == "tool"]
        assert (reward, ended, env.tool_schemas) == (1.0, True, schemas)


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "livecodebench", "apps", "taco"])
async def test_tasks_in_the_formats_of_the_field_are_played(name: str) -> None:
    factory = EnvFactory(EnvConfig(id="CodeSandbox", tasks={"train": f"{name}:{DATA / name}.jsonl"}), CodeSandbox)
    source = TaskSource.open(factory, "train", 0, DATA)
    assert source.num_tasks
    for cursor in range(source.num_tasks):
        task = source.task(cursor)
        if task["kind"] == "test_code":
            with pytest.raises(EnvError, match="test_code"):
                await CodeSandbox().areset(options={"task": task})
            continue
        results, reward, _, _ = await play(CodeSandbox(), task, write("pass\n"), TEST, DONE)
        assert results[1].startswith("failed")
        assert reward == 0.0


async def test_a_method_of_a_class_is_called() -> None:
    task = {**TASK, "cls": "Solution"}
    method = "class Solution:\n    def f(self, x):\n        return 2 * x\n"
    results, reward, _, _ = await play(CodeSandbox(), task, write(method), TEST, DONE)
    assert (results[1], reward) == ("passed", 1.0)


def test_splits_share_no_composition_and_positions_hold_the_same_task() -> None:
    train, test = set(compositions("train")), set(compositions("test"))
    assert not train & test
    assert len(train) > 4 * len(test) * 0.9
    tasks = Compositions("test")
    assert tasks[5] == Compositions("test")[5] != tasks[6]
    assert tasks[-1] == tasks[len(tasks) - 1]
    prompts = {task["prompt"] for task in tasks[:200]}
    assert prompts <= {f"Write f(x): {', '.join(o.phrase for o in operations)}." for operations in test}
    with pytest.raises(ValueError, match="train"):
        Compositions("dev")


async def test_the_meant_program_passes_and_every_other_reading_fails_the_first_visible_test() -> None:
    rng = random.Random(4)
    for _ in range(6):
        puzzle = draw(rng, compositions("test"))
        _, reward, _, _ = await play(CodeSandbox(), puzzle.task(), write(program(puzzle.meant)), DONE)
        assert reward == 1.0
        for other in puzzle.others:
            results, _, _, _ = await play(CodeSandbox(), puzzle.task(), write(program(other)), TEST)
            assert results[1].startswith("failed: f(")


def test_readings_that_no_test_can_tell_apart_are_never_asked_for() -> None:
    named = {operation.phrase: operation for operation in OPERATIONS}
    vague = (named["put the length at an end"], named["sort"], named["reverse"])
    clear = (named["sort"], named["put the length at an end"], named["reverse"])
    assert {draw(random.Random(seed), [vague, clear]).operations for seed in range(20)} == {clear}


def test_two_readings_are_never_the_same_program() -> None:
    readings = [reading for operation in OPERATIONS for reading in operation.readings]
    assert len(readings) == len(set(readings))


async def test_the_contract_of_environments_and_of_gymnasium_is_kept() -> None:
    assert check_env(CodeSandbox()) == []
    gymnasium_check(gymnasium.make("gspo_agent/CodeSandbox-v0").unwrapped, skip_render_check=True)
