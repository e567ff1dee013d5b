from __future__ import annotations

import json
import random

import gymnasium
import pytest

from envs.calculator import Calculator, evaluate
from gspo_agent.env import check_env
from gspo_agent.errors import ToolError
from gspo_agent.messages import assistant, call, user


@pytest.mark.filterwarnings("error")
def test_it_breaks_no_promise_and_gymnasium_makes_it() -> None:
    assert check_env(Calculator) == []
    assert check_env(gymnasium.make("gspo_agent/Calculator-v0", flaky=0.5).unwrapped) == []


async def test_an_episode_asks_calculates_and_answers() -> None:
    env = Calculator()
    observation, _ = await env.areset(seed=0, options={"task": {"expression": "12 * (30 - 5)"}})
    assert observation == [user("What is 12 * (30 - 5)?")]
    answered = await env.astep(assistant("", [call("calculate", expression="12 * (30 - 5)")]))
    assert answered[0][0]["content"] == "300"
    assert (await env.astep(assistant("It is 300.")))[1:3] == (1.0, True)
    await env.aclose()


@pytest.mark.parametrize(
    ("answer", "right"),
    [("-5", 1.0), ("5", 0.0), ("", 0.0), ("first 7, then -5", 1.0), ("-5 or 3", 0.0), ("9" * 9000, 0.0)],
)
async def test_the_last_number_of_the_answer_counts(answer: str, right: float) -> None:
    env = Calculator()
    await env.areset(seed=0, options={"task": {"expression": "10 - 15"}})
    assert (await env.astep(assistant(answer)))[4]["components"] == {"right": right}
    await env.aclose()


async def test_a_flaky_call_fails_as_often_as_it_says_and_alike_after_a_restart() -> None:
    env = Calculator(flaky=0.3)
    await env.areset(seed=1)
    state, outcomes = env.get_state(), []
    for _ in range(400):
        outcomes.append((await env.astep(assistant("", [call("calculate", expression="1 + 1")])))[0][0]["content"])
    assert 90 < outcomes.count("the calculator timed out") < 150
    assert set(outcomes) == {"the calculator timed out", "2"}
    twin = Calculator(flaky=0.3)
    twin.set_state(json.loads(json.dumps(state)))
    again = [
        (await twin.astep(assistant("", [call("calculate", expression="1 + 1")])))[0][0]["content"] for _ in range(40)
    ]
    assert again == outcomes[:40]
    await env.aclose()
    await twin.aclose()


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 ** 9",
        "__import__('os')",
        "1.5 + 1",
        "True + 1",
        "a",
        "1 +",
        "(" * 150,
        "1" * 201,
        "1 / 2",
        "12; 13",
        "\x00",
        "1e9",
    ],
)
def test_what_is_no_sum_of_whole_numbers_is_refused_and_never_run(expression: str) -> None:
    with pytest.raises(ToolError):
        evaluate(expression)


@pytest.mark.parametrize(
    ("expression", "value"), [("1 + 2 * 3", 7), ("-(4 - 9)*2", 10), (" 012 "[2:], 12), ("9" * 60 + "*1", int("9" * 60))]
)
def test_sums_are_worked_out_exactly(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize("flaky", [-0.1, 1.0])
def test_a_chance_that_is_none_is_refused(flaky: float) -> None:
    with pytest.raises(ValueError, match="not a probability"):
        Calculator(flaky=flaky)


def test_tasks_are_the_same_every_time_and_the_splits_share_no_numbers() -> None:
    train, test = Calculator.tasks("train"), Calculator.tasks("test")
    assert (len(train), len(test)) == (100_000, 10_000)
    assert train[17] == Calculator.tasks("train")[17] == train[17 - len(train)]
    assert train[3:5] == [train[3], train[4]]

    def numbers(split: object) -> set[tuple[str, ...]]:
        return {
            tuple(c for c in task["expression"].replace("(", "").replace(")", "").split() if c.isdigit())
            for task in split
        }  # type: ignore[attr-defined]

    assert not numbers(train[:3000]) & numbers(test[:3000])
    with pytest.raises(IndexError):
        train[100_000]
    with pytest.raises(ValueError, match="no split 'dev'"):
        Calculator.tasks("dev")


def test_demonstrations_copy_first_and_then_show_both_ways_each_right() -> None:
    rng = random.Random(0)
    echoes = [Calculator.demonstration(rng, 0.1)[0] for _ in range(50)]
    assert all(messages[0]["content"] == messages[1]["content"] and len(messages) == 2 for messages in echoes)
    shown = [Calculator.demonstration(rng, 0.9, flaky=0.3)[0] for _ in range(2000)]
    for messages in shown:
        question = messages[0]["content"].removeprefix("What is ").removesuffix("?")
        assert messages[-1]["content"] == str(evaluate(question))
    with_tool = [messages for messages in shown if len(messages) > 2]
    assert 900 < len(with_tool) < 1100
    failed = [messages for messages in with_tool if messages[2]["outcome"] == "error"]
    again = [messages for messages in failed if messages[3].get("tool_calls")]
    assert 0.25 < len(failed) / len(with_tool) < 0.35
    assert 0.4 < len(again) / len(failed) < 0.6


def test_demonstrations_teach_no_held_out_numbers() -> None:
    rng = random.Random(1)
    seen = {
        Calculator.demonstration(rng, 0.9)[0][0]["content"].removeprefix("What is ").removesuffix("?")
        for _ in range(3000)
    }
    assert not seen & {task["expression"] for task in Calculator.tasks("test")[:5000]}
