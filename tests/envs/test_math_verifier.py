"""The math environment, its procedural problems, and the session that another process brings back."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from envs.math_verifier import MathVerifier, Problems
from envs.math_verifier.environment import AGAIN
from envs.math_verifier.problems import TEMPLATES, TIMED_OUT, draw, held_out
from gspo_agent.config import EnvConfig
from gspo_agent.env import EnvFactory, check_env
from gspo_agent.errors import EnvError, ReplayError, TaskError, Unscored
from gspo_agent.messages import Message, assistant, call
from gspo_agent.tasks import TaskSource
from rewards.math_answer import Workers
from rewards.math_answer.files import verify_file
from tests.rewards.math_answer.test_verdict import CASES, text_of

TASK = {"problem": "What is 6 times 7?", "gold": "42918"}
ANSWER = assistant(r"It is \boxed{42918}.")


def python(code: str) -> Message:
    return assistant("", [call("python", code=code)])


async def play(env: MathVerifier, *actions: Message, seed: int = 0) -> tuple[list[Message], float, bool]:
    """The tool's messages, the last reward, and whether the episode ended."""
    await env.areset(seed=seed, options={"task": TASK})
    replies: list[Message] = []
    for action in actions:
        messages, reward, ended, _, _ = await env.astep(action)
        replies += messages
    return replies, reward, ended


@pytest.fixture
async def env() -> Any:
    made = MathVerifier()
    yield made
    await made.aclose()


async def test_variables_live_on_and_the_boxed_answer_of_a_turn_without_a_call_is_verified(env: MathVerifier) -> None:
    replies, reward, ended = await play(env, python("x = 6"), python("x * 7"), ANSWER)
    assert [(m["content"], m["outcome"]) for m in replies] == [("", "ok"), ("42", "ok")]
    assert (reward, ended) == (1.0, True)


@pytest.mark.parametrize("text", ["42918", "The answer is 42918.", r"\boxed{42917}", "", r"<think>\boxed{42918}"])
async def test_without_the_right_box_there_is_no_reward(env: MathVerifier, text: str) -> None:
    _, reward, ended = await play(env, assistant(text))
    assert (reward, ended) == (0.0, True)


async def test_a_box_beside_a_call_is_no_submission_and_a_limit_scores_nothing(env: MathVerifier) -> None:
    _, reward, ended = await play(env, assistant(r"\boxed{42918}", [call("python", code="1")]))
    assert (reward, ended) == (0.0, False)
    assert (await env.afinish("turns"))[0] == 0.0


@pytest.mark.parametrize("said", ["", "see above", "The answer is what the tool says."])
async def test_what_a_tool_prints_is_no_answer_of_the_model(env: MathVerifier, said: str) -> None:
    show = python(r"print(r'The answer is \boxed{42918}.')")
    replies, reward, ended = await play(env, show, assistant(said))
    assert r"\boxed{42918}" in replies[0]["content"]
    assert (reward, ended) == (0.0, True)
    await play(env, show)
    assert (await env.afinish("turns"))[0] == 0.0


async def test_what_goes_wrong_in_the_code_is_an_error_that_the_model_reads(env: MathVerifier) -> None:
    (reply,), _, ended = await play(env, python("1 / 0"))
    assert reply["outcome"] == "error"
    assert "ZeroDivisionError" in reply["content"]
    assert not ended


async def test_a_session_that_ended_is_followed_by_a_fresh_one(env: MathVerifier) -> None:
    replies, _, _ = await play(env, python("x = 1"), python("import os; os._exit(0)"), python("x"), python("2"))
    assert [m["outcome"] for m in replies] == ["ok", "error", "error", "ok"]
    assert "NameError" in replies[2]["content"]


async def test_the_gold_answer_is_neither_in_the_prompt_nor_in_the_sandbox(env: MathVerifier) -> None:
    messages, _ = await env.areset(seed=0, options={"task": TASK})
    assert TASK["gold"] not in json.dumps([messages, env.tool_schemas])
    probe = "import gc, sys\n'429' + '18' in repr(globals()) + repr(sys.modules.keys())"
    replies, *_ = await env.astep(python(probe))
    assert replies[0]["content"] == "False"
    (reply,), *_ = await env.astep(python("import rewards"))
    assert "ModuleNotFoundError" in reply["content"]


async def test_the_tool_can_be_left_out() -> None:
    env = MathVerifier(tool=False)
    (reply,), _, _ = await play(env, python("1"))
    assert env.tool_schemas == []
    assert "no tool 'python'" in reply["content"]


async def test_an_unusable_task_is_named_and_an_unreadable_gold_answer_is_never_a_reward_of_0(
    env: MathVerifier,
) -> None:
    with pytest.raises(EnvError, match="no 'gold'"):
        await env.areset(options={"task": {"problem": "1?"}})
    unreadable = {"problem": "1?", "gold": "1/0"}
    with pytest.raises(
        EnvError, match="the gold answer cannot be an answer: it has no value"
    ):  # before a token is spent
        await env.areset(options={"task": unreadable})
    with pytest.raises(Unscored):
        await env.score(unreadable, r"\boxed{1}")
    for options in ({"flaky": 1.5}, {"retries": 2}):
        with pytest.raises(ValueError, match=next(iter(options))):
            MathVerifier(**options)


async def test_its_workers_end_with_the_run() -> None:
    factory = EnvFactory(EnvConfig(id="math"), MathVerifier)
    env = factory.create()
    await env.areset(options={"task": TASK})
    await env.aclose()
    assert not env.shared._closed
    await factory.aclose()
    assert env.shared._closed


def test_rows_that_cannot_be_tasks_say_why() -> None:
    MathVerifier.check_task({"problem": "Which?", "gold": "(C)", "answer_type": "choice", "choices": "ABC"})
    for changes, said in (
        ({"problem": " "}, "no 'problem'"),
        ({"gold": r"\frac{1}{2"}, "the gold answer is not equal to itself: no_answer:unclosed_box"),
        ({"gold": "1" * 1001}, "the gold answer cannot be an answer: it has no value"),
        ({"gold": "none of these", "answer_type": "choice"}, "the gold answer cannot be an answer: it has no value"),
        ({"rel_tol": 2}, "rel_tol is 2; write a share"),
        ({"retries": 2}, "retries is 2; write 0 or 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            MathVerifier.check_task(TASK | changes)


async def test_a_task_says_how_its_answer_is_compared(env: MathVerifier) -> None:
    task = {"problem": "Which, in Carl's words?", "gold": "B", "answer_type": "choice", "choices": "AB"}
    await env.areset(options={"task": task})
    _, reward, *_, info = await env.astep(assistant(r"\boxed{\text{(B)}}"))
    assert (reward, info["metrics"]) == (1.0, {"count/verdict/equal:choice": 1.0})
    task = {"problem": "About?", "gold": "3.14159", "rel_tol": 0.01, "anchors": True}
    await env.areset(options={"task": task})
    assert (await env.astep(assistant("The answer is 3.14")))[1] == 0.0  # only a box counts
    await env.areset(options={"task": task})
    assert (await env.astep(assistant(r"\boxed{3.14}")))[1] == 1.0


DATA = Path(__file__).parents[2] / "examples" / "data"


@pytest.mark.parametrize("format", ["gsm8k", "math", "aime", "dapo"])
async def test_task_files_of_the_field_are_read_and_their_gold_answers_accepted(
    format: str, env: MathVerifier, tmp_path: Path
) -> None:
    section = EnvConfig(id="math", tasks={"train": f"{format}:{format}.jsonl"})
    source = TaskSource.open(EnvFactory(section, MathVerifier), "train", 0, DATA)
    for cursor in range(source.num_tasks or 0):
        task = source.task(cursor)
        await env.areset(options={"task": task})
        assert (await env.astep(assistant(rf"so \boxed{{{task['gold']}}}")))[1] == 1.0


def test_gold_answers_that_are_not_equal_to_themselves_are_listed_with_their_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golds = ["72", r"\frac{1}{2", "1/0", "", r"\sqrt{2}"]
    rows = [{"question": "?", "answer": f"so\n#### {gold}"} for gold in golds]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    section = EnvConfig(id="math", tasks={"train": "gsm8k:t.jsonl"})
    with pytest.raises(TaskError) as refusal:
        TaskSource.open(EnvFactory(section, MathVerifier), "train", 0, tmp_path)
    lines = str(refusal.value).splitlines()
    assert [line.partition("t.jsonl:")[2].partition(":")[0] for line in lines[:3]] == ["2", "3", "4"]
    assert "the gold answer is not equal to itself: no_answer:unclosed_box" in lines[0]
    assert lines[3].startswith("gsm8k:t.jsonl: 3 of 5 rows cannot be used; mend or remove them, or write bad_tasks")
    dropping = EnvFactory(section.model_copy(update={"bad_tasks": "drop"}), MathVerifier)
    source = TaskSource.open(dropping, "train", 0, tmp_path)
    assert {source.task(cursor)["gold"] for cursor in range(2)} == {"72", r"\sqrt{2}"}
    assert "3 of 5 rows cannot be used, and are left out" in caplog.text


WRONG = assistant(r"\boxed{42917}")


async def test_a_second_try_is_given_only_where_it_is_allowed_and_is_worth_half() -> None:
    env = MathVerifier(retries=1)
    replies, reward, ended = await play(env, WRONG, ANSWER)
    assert [(m["role"], m["content"]) for m in replies] == [("user", AGAIN)]
    assert (reward, ended) == (0.5, True)
    assert (await play(env, ANSWER))[1:] == (1.0, True)
    assert (await play(env, WRONG, WRONG))[1:] == (0.0, True)  # and no third
    for text in ("no box", r"\boxed{-1}", r"\boxed{42917.9}", r"\boxed{\{1,2\}}", ""):
        assert [m["content"] for m in (await play(env, assistant(text)))[0]] == [AGAIN]  # never another word
    await env.aclose()


@pytest.mark.parametrize(
    ("gold", "given"),
    [
        ("42918", True), (r"\frac{355}{113}", True), (r"2\sqrt{3}+1", True), ("(3,4)", True), ("x^2+1", True),
        ("7", False), ("-99", False), ("1/2", False), ("0.25", False), (r"\pi", False), ("x", False),
        (r"\text{yes}", False), (r"\infty", False), ("none of them", False),
    ],
)  # fmt: skip
async def test_nobody_gets_a_second_guess_among_few_answers(gold: str, given: bool) -> None:
    env = MathVerifier(retries=1)
    for task, allowed in (
        ({"problem": "?", "gold": gold}, given),
        ({"problem": "?", "gold": gold, "retries": 0}, False),
        ({"problem": "?", "gold": "C", "retries": 1, "answer_type": "choice"}, False),
    ):
        await env.areset(options={"task": task})
        assert (await env.astep(assistant(r"\boxed{987654}")))[2] != allowed
    await env.aclose()


async def test_a_second_try_survives_the_process() -> None:
    first = MathVerifier(retries=1)
    await play(first, WRONG)
    state = json.loads(json.dumps(first.get_state()))
    await first.aclose()
    env = MathVerifier(retries=1)
    env.set_state(state)
    assert (await env.astep(ANSWER))[1:3] == (0.5, True)
    await env.aclose()


async def test_without_retries_no_verdict_is_reached_before_the_end_and_none_is_shown(
    env: MathVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def verdict(self: MathVerifier, task: Any, answer: str) -> Any:
        asked.append(answer)
        return await original(self, task, answer)

    original = MathVerifier._verdict
    monkeypatch.setattr(MathVerifier, "_verdict", verdict)
    _, _, ended = await play(env, python("1"), assistant(r"\boxed{1}", [call("python", code="2")]))
    assert (asked, ended) == ([], False)
    messages, reward, *_ = await env.astep(WRONG)
    assert (messages, reward, asked) == ([], 0.0, [WRONG["content"]])


SUM = {"problem": "Add up the first n numbers.", "gold": r"\frac{n(n+1)}{2}"}


async def test_what_the_parser_leaves_undecided_is_asked_of_a_worker_and_a_dead_one_is_never_a_reward_of_0(
    env: MathVerifier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await env.areset(options={"task": SUM})
    _, reward, *_, info = await env.astep(assistant(r"\boxed{\sum_{k=1}^{n} k}"))
    assert (reward, info["metrics"]) == (1.0, {"count/verdict/equal:num": 1.0})

    monkeypatch.setattr(sys, "executable", "/bin/false")
    env.shared = Workers()
    await env.areset(options={"task": SUM})
    with pytest.raises(Unscored, match="no verdict: worker_died") as raised:
        await env.astep(assistant(r"\boxed{\sum_{k=1}^{n} k}"))
    assert "is sympy installed?" in caplog.text
    told = caplog.text + "".join(traceback.format_exception(raised.value))
    assert SUM["gold"] not in told  # nor is it in anything that is written down
    env.shared.close()


async def test_the_score_is_what_the_command_says_of_the_same_rows(
    env: MathVerifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case for case in CASES if not case.get("hostile")]  # the endless ones would take seconds
    rows = [{"text": text_of(case), "gold": case["gold"], **case.get("opts", {})} for case in cases]
    rows.append({"text": r"\boxed{\sum_{k=1}^{n} k}", "gold": SUM["gold"]})
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert await verify_file(file, anchors=False) == 0
    await env.areset(options={"task": TASK})
    said = {line["id"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    for number, row in enumerate(rows, 1):
        line = said[f"{file}:{number}"]
        env.metrics.clear()
        assert await env.score(row, row["text"]) == {"right": float(line["correct"])}, line
        assert env.metrics == {f"count/verdict/{line['reason']}": 1.0}, line


async def test_an_episode_goes_on_in_a_fresh_instance_with_its_variables_and_its_draws() -> None:
    actions = [python(f"x = globals().get('x', 0) + {2**n}; x") for n in range(12)]
    whole = MathVerifier(flaky=0.4)
    uncut, _, _ = await play(whole, *actions, seed=3)
    await whole.aclose()
    assert {m["outcome"] for m in uncut} == {"ok", "error"}

    env = MathVerifier(flaky=0.4)
    await env.areset(seed=3, options={"task": TASK})
    replies: list[Message] = []
    for action in actions:
        messages, *_ = await env.astep(action)
        replies += messages
        state = json.loads(json.dumps(env.get_state()))
        await env.aclose()
        env = MathVerifier(flaky=0.4)
        env.set_state(state)
    _, reward, *_ = await env.astep(ANSWER)
    assert [m["content"] for m in replies] == [m["content"] for m in uncut]
    assert reward == 1.0
    await env.aclose()


async def test_a_session_that_answers_differently_when_repeated_is_not_gone_on_with(env: MathVerifier) -> None:
    await play(env, python("1"), python("import os; os.urandom(4).hex()"))
    seen = env.cells[1][3]
    state = env.get_state()
    again = MathVerifier()
    again.set_state(state)
    with pytest.raises(ReplayError) as raised:
        await again.astep(python("1"))
    assert (raised.value.turn, raised.value.recorded) == (1, seen)
    assert re.fullmatch(r"'[0-9a-f]{8}'\n", raised.value.observed)
    assert raised.value.observed != seen
    await again.aclose()


async def test_a_flaky_call_is_reported_as_timed_out_and_not_run() -> None:
    env = MathVerifier(flaky=0.999999)
    (reply,), _, ended = await play(env, python("1"))
    assert (reply["content"], reply["outcome"], ended) == (TIMED_OUT, "error", False)
    assert env.cells == ()


@pytest.mark.filterwarnings("error")
def test_it_keeps_gymnasiums_contract_and_ours() -> None:
    assert check_env(MathVerifier(flaky=0.3)) == []
    made = gymnasium.make("gspo_agent/MathVerifier-v0", flaky=0.3)
    gymnasium_check(made.unwrapped, skip_render_check=True)
    made.close()


def test_no_three_numbers_of_one_split_occur_in_the_other() -> None:
    seen = {}
    for split in ("train", "test"):
        problems = Problems(split)
        seen[split] = {tuple(sorted(map(int, re.findall(r"\d+", p["problem"])))) for p in problems[:3000]}
        assert problems[-1] == problems[len(problems) - 1]
    assert not seen["train"] & seen["test"]
    for a, b, c in itertools.combinations(range(11, 40), 3):
        assert len({held_out(*order) for order in itertools.permutations((a, b, c))}) == 1
    with pytest.raises(ValueError, match="no split 'dev'"):
        Problems("dev")


def test_every_template_means_what_it_says() -> None:
    numbers = {"a": 13, "b": 57, "c": 91}
    for template in TEMPLATES:
        # Digits, operators and parentheses of our own table: nothing untrusted is evaluated here.
        assert template.value(**numbers) == eval(template.expression.format(**numbers))


def test_demonstrations_copy_first_and_then_are_right_with_and_without_the_tool() -> None:
    rng = random.Random(0)
    used = retried = failures = 0
    for number in range(2000):
        messages, schemas = MathVerifier.demonstration(rng, 0.25 + 0.75 * number / 2000, flaky=0.3)
        assert schemas[0]["function"]["name"] == "python"
        outcomes = [m["outcome"] for m in messages if m["role"] == "tool"]
        used += bool(outcomes)
        failures += outcomes.count("error")
        retried += max(0, len(outcomes) - 1)
        results = [m["content"] for m in messages if m["role"] == "tool" and m["outcome"] == "ok"]
        assert all(rf"\boxed{{{result}}}" == messages[-1]["content"] for result in results)
    assert 0.3 < used / 2000 < 0.42
    assert 0.35 < retried / failures < 0.65
    for number in range(200):
        messages, _ = MathVerifier.demonstration(rng, 0.25 * number / 200, flaky=0.3)
        copied = messages[-1]["content"].removeprefix(r"\boxed{").removesuffix("}")
        assert copied in [m["content"] for m in messages[:-1]]


def test_the_demonstrated_problems_are_training_problems() -> None:
    for seed in range(300):
        problem = draw("train", random.Random(seed))
        assert not held_out(*map(int, re.findall(r"\d+", problem.question)))
