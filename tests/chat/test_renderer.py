from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.qwen3 import Qwen3Renderer

from gspo_agent.chat import RendererChat
from gspo_agent.config import Limits
from gspo_agent.env import ToolEnv, tool
from gspo_agent.messages import Message, assistant, call, system, tool_result, user
from gspo_agent.rollout.episode import run_episode
from gspo_agent.testing import ScriptedEngine
from gspo_agent.tiny import CONTROL_TOKENS, MARKUP_TOKENS, render
from gspo_agent.trajectory import Trajectory
from tests.chat.conftest import TOOLS, demonstration, letter_by_letter

HOSTILE = "".join(CONTROL_TOKENS + MARKUP_TOKENS)
TEXT = st.one_of(
    st.text(max_size=12).filter(lambda text: "\ufdd0" not in text),
    st.lists(st.sampled_from([*CONTROL_TOKENS, *MARKUP_TOKENS, "12", "<", "a"]), max_size=4).map("".join),
)
CALL = st.builds(
    lambda name, arguments: call(name, **arguments),
    st.sampled_from(["python", "submit"]),
    st.dictionaries(
        st.sampled_from(["code", "x"]), TEXT | st.integers(-(2**63), 2**64 - 1) | st.lists(TEXT, max_size=2), max_size=2
    ),
)
TURN = st.builds(assistant, TEXT, st.lists(CALL, max_size=3))
ANSWERS = st.lists(st.builds(tool_result, TEXT) | st.builds(user, TEXT), min_size=1, max_size=3)


@st.composite
def conversations(draw: Any) -> list[Message]:
    messages = [system(draw(TEXT)), user(draw(TEXT))] if draw(st.booleans()) else [user(draw(TEXT))]
    for _ in range(draw(st.integers(1, 3))):
        messages += [draw(TURN), *draw(ANSWERS)]
    return messages if draw(st.booleans()) else [*messages, draw(TURN)]


def sampled(chat: RendererChat, text: str) -> list[int]:
    """The ids of a turn that wrote `text`, special tokens and all."""
    return chat.tokenizer.encode(text)


def closed_by(chat: RendererChat, turn: list[int], messages: list[Message]) -> str | None:
    prompt = chat.open([user("hi")], TOOLS)
    tail = chat.extend(prompt + turn, len(prompt), messages, TOOLS)
    return None if tail is None else chat.tokenizer.decode(tail)


NEXT = "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"


def test_a_local_qwen3_gets_its_renderer(chat: RendererChat) -> None:
    assert isinstance(chat.renderer, Qwen3Renderer)
    assert chat.renderer.effective_thinking_retention == "all"
    assert chat.stop_token_ids == tuple(chat.tokenizer.control_ids[token] for token in ("<|im_end|>", "<|endoftext|>"))
    assert chat.vocab_size == len(chat.tokenizer.inner)


def test_open_writes_the_prompt_of_the_template(chat: RendererChat) -> None:
    messages = demonstration(12, 34)[:2]
    expected = render(messages, TOOLS) + "<|im_start|>assistant\n"
    assert chat.tokenizer.decode(chat.open(messages, TOOLS)) == expected


@pytest.mark.parametrize(
    ("turn", "tail"),
    [
        ("done<|im_end|>", NEXT),
        ("done", "<|im_end|>" + NEXT),
        ("", "<|im_end|>" + NEXT),
        ("done<|endoftext|>", NEXT),
        ('<tool_call>\n{"name": "python"', "<|im_end|>" + NEXT),
        ("<think>\nhm\n</think>\n\ndone<|im_end|>", NEXT),
        ("<think>\nhm", "</think><|im_end|>" + NEXT),
        ("<think>\nhm<|im_end|>", None),
        ("done<|im_end|>more", None),
        ("done<|im_end|><|im_end|>", None),
        ("done<|endoftext|>\n", None),
    ],
)
def test_a_turn_is_closed_only_where_every_sampled_token_stays(chat: RendererChat, turn: str, tail: str | None) -> None:
    assert closed_by(chat, sampled(chat, turn), [user("ok")]) == tail


def test_results_of_one_turn_share_one_wrapper(chat: RendererChat) -> None:
    tail = closed_by(chat, sampled(chat, "x<|im_end|>"), [tool_result("1"), tool_result("2")])
    assert tail == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


LIKE_WRITTEN = [
    "The answer is 1234.<|im_end|>",
    "The answer is 1234.",
    '<tool_call>\n{"name": "python", "arguments": {"code": "1234"}}\n</tool_call><|im_end|>',
    "<think>\nThe answer\n</think>\n\nThe answer is 1234.<|im_end|>",
    "<think>\nThe answer is",
]


@pytest.mark.parametrize("text", LIKE_WRITTEN)
def test_a_turn_of_other_ids_that_read_alike_is_closed_and_parsed_alike(chat: RendererChat, text: str) -> None:
    usual, sampled_otherwise = sampled(chat, text), letter_by_letter(chat, text)
    assert closed_by(chat, sampled_otherwise, [user("ok")]) == closed_by(chat, usual, [user("ok")]) is not None
    assert chat.parse(sampled_otherwise, TOOLS) == chat.parse(usual, TOOLS)


class Interpreter(ToolEnv):
    """A tool that says what it is told."""

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return demonstration(12, 34)[:2]

    @tool
    async def python(self, code: str) -> str:
        """Run Python."""
        return code

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float("1234" in answer)


class Prompted(ScriptedEngine):
    """Keeps every prompt."""

    prompts: list[list[int]]

    async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str) -> Any:
        self.prompts.append(list(token_ids))
        return await super().generate(token_ids, sampling, request_id=request_id)


@pytest.mark.parametrize("thinking", [True, False])
async def test_an_episode_keeps_every_sampled_id_and_grows_into_what_the_template_writes(
    chat: RendererChat, thinking: bool
) -> None:
    """Three turns whose ids the tokenizer would not have chosen, with old thinking that templates strip and two results
    beside each other, cut at every seventh token: every prompt begins with the one before it."""
    calls = [f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{n}"}}}}\n</tool_call>' for n in (12, 34, 56)]
    texts = [f"{calls[0]}\n{calls[1]}<|im_end|>", f"{calls[2]}<|im_end|>", "The answer is 1234.<|im_end|>"]
    if thinking:
        texts = [f"<think>\nThe answer {n}\n</think>\n\n{text}" for n, text in enumerate(texts)]
    turns = [letter_by_letter(chat, text) for text in texts]
    mark, *header = chat.tokenizer.encode("<|im_start|>assistant\n")

    def answer(prompt: Sequence[int], seed: int) -> list[int]:
        begun = sum(list(prompt[n : n + 2]) == [mark, *header[:1]] for n in range(len(prompt) - 1))
        return [*header, *turns[begun]]

    engine = Prompted(answer, turn_mark=mark, vocab_size=chat.vocab_size)
    engine.prompts = []
    trajectory = Trajectory(1, 0, 0, seed=5)
    await run_episode(
        trajectory, env=Interpreter(), chat=chat, engine=engine, task={}, limits=Limits(), journal_tokens=7
    )
    assert (trajectory.stop_reason, trajectory.reward) == ("terminated", 1.0)
    (row,) = trajectory.rows()
    assert row.token_ids[row.sampled].tolist() == [token for turn in turns for token in turn]
    assert len(engine.prompts) > 20
    for before, after in zip(engine.prompts, [*engine.prompts[1:], row.token_ids.tolist()], strict=True):
        assert after[: len(before)] == before
    if not thinking:
        env = Interpreter()
        await env.areset(seed=5, options={"task": {}})
        assert chat.tokenizer.decode(row.token_ids.tolist()) + "\n" == render(trajectory.messages, env.tool_schemas)


def test_tool_output_cannot_end_a_turn_or_open_one(chat: RendererChat) -> None:
    prompt = chat.open([user("hi")], TOOLS)
    control = set(chat.tokenizer.control_ids.values())

    def special(messages: list[Message]) -> list[int]:
        tail = chat.extend(prompt, len(prompt), messages, TOOLS)
        assert tail is not None
        return [i for i in tail if i in control]

    assert special([tool_result(HOSTILE), user(HOSTILE)]) == special([tool_result("x"), user("x")])


def test_schemas_and_prompts_cannot_smuggle_special_tokens(chat: RendererChat) -> None:
    control = set(chat.tokenizer.control_ids.values())

    def special(text: str) -> list[int]:
        tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {text: [text]}}}
        return [i for i in chat.open([system(text), user(text)], [tool]) if i in control]

    assert special(HOSTILE) == special("x")


def test_thinking_that_the_prompt_opened_is_closed(chat: RendererChat) -> None:
    opened = chat.open([user("hi")], TOOLS) + chat.tokenizer.encode("<think>\n")
    tail = chat.extend(opened + sampled(chat, "hm"), len(opened), [user("ok")], TOOLS)
    assert tail is not None
    assert chat.tokenizer.decode(tail) == "</think><|im_end|>" + NEXT
    assert chat.extend(opened + sampled(chat, "hm<|im_end|>"), len(opened), [user("ok")], TOOLS) is None


@settings(max_examples=30)
@given(messages=conversations())
def test_a_short_prompt_bridges_as_the_whole_one_does(chat: RendererChat, messages: list[Message]) -> None:
    ids, written = (
        chat.conversation([*messages, assistant("x")], TOOLS)
        if messages[-1]["role"] != "assistant"
        else (chat.conversation(messages, TOOLS))
    )
    start = max(i for i in range(len(ids)) if written[i] and not written[i - 1])
    for answer in ([user("ok")], [tool_result("<think>")]):
        guarded = chat.tokenizer.guard_messages(answer)
        whole = chat.renderer.bridge_to_next_turn(ids[:start], ids[start:], guarded, tools=None)
        assert chat.extend(ids, start, answer, TOOLS) == whole.token_ids[len(ids) :]


@settings(max_examples=50)
@given(messages=conversations())
def test_a_written_conversation_is_what_an_episode_would_have_grown(
    chat: RendererChat, messages: list[Message]
) -> None:
    ids, written = chat.conversation(messages, TOOLS)
    position = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    grown = chat.open(messages[:position], TOOLS)
    while position < len(messages):
        start = len(grown)
        end = start
        while end < len(ids) and written[end]:
            end += 1
        turn = ids[start:end]
        assert turn[-1] in chat.stop_token_ids
        said = chat.parse(turn, TOOLS)
        assert said["content"] == messages[position]["content"].strip()
        assert said.get("tool_calls") == messages[position].get("tool_calls")
        grown += turn
        answers = []
        position += 1
        while position < len(messages) and messages[position]["role"] != "assistant":
            answers.append(messages[position])
            position += 1
        if answers:
            tail = chat.extend(np.asarray(grown, dtype=np.int32), start, answers, TOOLS)  # type: ignore[arg-type]
            assert tail is not None
            grown += tail
    assert grown == ids


def test_thinking_is_part_of_a_written_turn(chat: RendererChat) -> None:
    thought: Message = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    ids, written = chat.conversation([user("2+2?"), thought, user("sure?"), thought], [])
    turn = chat.tokenizer.decode([i for i, mine in zip(ids, written, strict=True) if mine])
    assert turn == "<think>\n2 and 2\n</think>\n\n4<|im_end|>" * 2
    assert chat.parse(sampled(chat, "<think>\n2 and 2\n</think>\n\n4<|im_end|>"), []) == thought


def test_conversations_that_no_episode_could_have_are_refused(chat: RendererChat) -> None:
    with pytest.raises(ValueError, match="both the assistant's"):
        chat.conversation([user("a"), assistant("b"), assistant("c")], [])
    with pytest.raises(ValueError, match="needs a message"):
        chat.conversation([assistant("b")], [])
    with pytest.raises(ValueError, match="none of the assistant's"):
        chat.extend([1, 2], 1, [assistant("b")], [])
    with pytest.raises(ValueError, match="at least one"):
        chat.extend([1, 2], 1, [], [])


GOOD = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'


def test_several_calls_are_parsed_in_order(chat: RendererChat) -> None:
    message = chat.parse(sampled(chat, f"Both.\n{GOOD}\n{GOOD.replace('1', '2')}<|im_end|>"), TOOLS)
    assert message == assistant("Both.", [call("python", code="1"), call("python", code="2")])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\n{'name': 'python'}\n</tool_call>", "not valid JSON"),
        ('<tool_call>\n{"name": "python", "arguments": {}} please\n</tool_call>', "not valid JSON"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "no name"),
        ('<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>', "no name"),
        ('<tool_call>\n["python"]\n</tool_call>', "no name"),
        ('<tool_call>\n{"name": "python", "arguments": "1"}\n</tool_call>', "not an object but str"),
        ('<tool_call>\n{"name": "python", "arguments": [1]}\n</tool_call>', "not an object but list"),
        ('<tool_call>\n{"name": "python", "arguments": null}\n</tool_call>', "not an object but NoneType"),
        ('<tool_call>\n{"name": "python", "arguments": {"x": NaN}}\n</tool_call>', "cannot be used"),
        ('<tool_call>\n{"name": "python", "arguments": {"x": "\\ud800"}}\n</tool_call>', "cannot be used"),
        ('<tool_call>\n{"name": "\\ud800", "arguments": []}\n</tool_call>', "the arguments of ? are not an object"),
        ('<tool_call>\n{"name": "python", "arguments": {"x": 36893488147419103232}}\n</tool_call>', "cannot be used"),
        ('<tool_call>\n{"name": "python", "arguments": {"code": "1"}}', "not closed"),
        ("<tool_call>", "not closed"),
        (f"{GOOD} and so on", "text after the tool call: and so on"),
        (f"{GOOD}\n<tool_response>\n4\n</tool_response>", "text after the tool call"),
        ("<tool_call>" + "[" * 9999 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "python", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "python", "arguments": {"x": ' + "9" * 5000 + "}}", "not closed"),
    ],
)
def test_a_call_that_cannot_be_run_tells_why(chat: RendererChat, text: str, error: str) -> None:
    message = chat.parse(sampled(chat, f"So:\n{text}<|im_end|>"), TOOLS)
    (broken,) = message["tool_calls"]
    assert error in broken["error"]
    assert len(broken["error"]) < 500
    assert message["content"] == "So:"
    orjson.dumps(message)  # as the journal does


def test_a_broken_call_does_not_spoil_its_neighbours(chat: RendererChat) -> None:
    message = chat.parse(sampled(chat, f"{GOOD}\n<tool_call>\n{{\n</tool_call>\n{GOOD}<|im_end|>"), TOOLS)
    assert ["error" in found for found in message["tool_calls"]] == [False, True, False]


def test_text_between_calls_spoils_the_call_before_it(chat: RendererChat) -> None:
    message = chat.parse(sampled(chat, f"{GOOD} then {GOOD}<|im_end|>"), TOOLS)
    assert ["error" in found for found in message["tool_calls"]] == [True, False]


def test_a_turn_cut_inside_its_thinking_has_no_content(chat: RendererChat) -> None:
    message = chat.parse(sampled(chat, f"<think>\nI could {GOOD.replace('tool_call', 'x')}"), TOOLS)
    assert message["content"] == ""
    assert "I could" in message["reasoning_content"]
    assert "tool_calls" not in message
