from pathlib import Path

import pytest
from hypothesis import given, settings
from renderers.base import load_tokenizer

from gspo_agent.chat import RendererChat, TemplateChat
from gspo_agent.chat.text import SafeTokenizer
from gspo_agent.errors import ChatError
from gspo_agent.messages import Message, assistant, call, system, tool_result, user
from tests.chat.conftest import TOOLS, letter_by_letter
from tests.chat.test_renderer import HOSTILE, LIKE_WRITTEN, conversations

TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THINKING = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)
COUNTS = TEMPLATE.replace("<|im_start|>{{", "<|im_start|>{{ loop.revindex }}{{")
NO_END = TEMPLATE.replace("<|im_end|>\n{% endfor", "\n{% endfor")
PREFILLS = TEMPLATE.removesuffix("{% endif %}") + "<think>\n{% endif %}"
DATED = "{{ messages | length }}" + TEMPLATE
NO_TOOLS = TEMPLATE.split("{% endif %}", 1)[1]
SWALLOWS = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")


def make(model_path: Path, template: str) -> TemplateChat:
    tokenizer = load_tokenizer(str(model_path))
    tokenizer.chat_template = template
    return TemplateChat(SafeTokenizer(tokenizer))


@pytest.fixture(scope="module")
def chat(model_path: Path) -> TemplateChat:
    return make(model_path, TEMPLATE)


def test_an_episode_grows_into_what_the_template_writes(chat: TemplateChat) -> None:
    messages: list[Message] = [
        system("s"),
        user("one"),
        assistant("", [call("python", code="1")]),
        tool_result("1", name="python", call_id="0/0"),
        tool_result("2", name="python", call_id="0/1"),
        assistant("so"),
        user("two"),
        assistant("end"),
    ]
    ids, written = chat.conversation(messages, TOOLS)
    whole = chat._text(messages, TOOLS, False)
    assert chat.tokenizer.decode(ids) + "\n" == whole
    assert sum(i in chat.stop_token_ids for i, mine in zip(ids, written, strict=True) if mine) == 3


@settings(max_examples=20)
@given(messages=conversations())
def test_turns_come_back_from_a_written_conversation(chat: TemplateChat, messages: list[Message]) -> None:
    ids, written = chat.conversation(messages, TOOLS)
    turns: list[list[int]] = []
    for position, mine in enumerate(written):
        if mine and not written[position - 1]:
            turns.append([])
        if mine:
            turns[-1].append(ids[position])
    said = [message for message in messages if message["role"] == "assistant"]
    assert len(turns) == len(said)
    for turn in turns:
        assert turn[-1] in chat.stop_token_ids
        assert not set(turn[:-1]) & set(chat.stop_token_ids)


@pytest.mark.parametrize(
    ("turn", "closing"), [("done<|im_end|>", "\n"), ("done", "<|im_end|>\n"), ("a<|im_end|>b", None)]
)
def test_a_turn_is_closed_only_where_every_sampled_token_stays(
    chat: TemplateChat, turn: str, closing: str | None
) -> None:
    prompt = chat.open([user("hi")], [])
    tail = chat.extend(prompt + chat.tokenizer.encode(turn), len(prompt), [user("ok")], [])
    if closing is None:
        assert tail is None
    else:
        assert tail is not None
        assert chat.tokenizer.decode(tail) == closing + "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", LIKE_WRITTEN[:3])
def test_a_turn_of_other_ids_that_read_alike_is_closed_and_parsed_alike(chat: TemplateChat, text: str) -> None:
    prompt = chat.open([user("hi")], TOOLS)
    usual, otherwise = chat.tokenizer.encode(text), letter_by_letter(chat, text)
    tails = [chat.extend(prompt + turn, len(prompt), [user("ok")], TOOLS) for turn in (usual, otherwise)]
    assert tails[0] == tails[1] is not None
    assert chat.parse(otherwise, TOOLS) == chat.parse(usual, TOOLS)


def test_tool_output_cannot_end_a_turn(chat: TemplateChat) -> None:
    prompt = chat.open([user(HOSTILE)], TOOLS)
    tail = chat.extend(prompt, len(prompt), [tool_result(HOSTILE)], TOOLS)
    plain = chat.extend(prompt, len(prompt), [tool_result("x")], TOOLS)
    assert tail is not None
    assert plain is not None
    control = set(chat.tokenizer.control_ids.values())
    assert [i for i in tail if i in control] == [i for i in plain if i in control]
    assert HOSTILE in chat.tokenizer.decode(tail)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (STRIPS_THINKING, r"rewrites|breaks the prefix property"),
        (COUNTS, r"does not continue its own prompt|breaks the prefix property|rewrites"),
        (DATED, r"does not continue its own prompt|breaks|rewrites"),
        (NO_END, r"not with a special token"),
        (PREFILLS, r"does not continue its own prompt"),
        (SWALLOWS, r"assistant's content exactly once"),
        ("{{ raise_exception('no') }}", r"cannot write a conversation of user, assistant: no"),
        ("{{ nonsense", r"cannot write a conversation"),
    ],
)
def test_a_template_that_rewrites_history_is_refused(model_path: Path, template: str, problem: str) -> None:
    with pytest.raises(ChatError, match=problem) as refusal:
        make(model_path, template)
    assert str(model_path) in str(refusal.value)
    assert "use a model of a family" in str(refusal.value)


def test_a_template_without_tools_refuses_tools(model_path: Path) -> None:
    chat = make(model_path, NO_TOOLS)
    assert chat.open([user("x")], [])
    with pytest.raises(ChatError, match="does not show tools"):
        chat.open([user("x")], TOOLS)


def test_parse_reads_thinking_content_and_calls(chat: TemplateChat) -> None:
    text = '<think>\nhm\n</think>\n\nSo.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    message = chat.parse(chat.tokenizer.encode(text), TOOLS)
    assert message == {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": [call("f", x=1)]}
    assert chat.parse(chat.tokenizer.encode("<think>hm"), TOOLS) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
    }
    assert chat.parse([], TOOLS) == assistant("")


def test_both_chats_read_calls_alike(chat: TemplateChat, model_path: Path) -> None:
    from gspo_agent.chat import load_chat

    typed = load_chat(model_path)
    assert isinstance(typed, RendererChat)
    good = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    for text in (
        good,
        good + "x",
        "a" + good + good,
        "<tool_call>{</tool_call>" + good,
        "<tool_call>",
        "none",
        "<tool_call>[1]",
    ):
        ids = chat.tokenizer.encode(text)
        mine, theirs = chat.parse(ids, TOOLS), typed.parse(ids, TOOLS)
        assert mine["content"] == theirs["content"]
        assert ["error" in c for c in mine.get("tool_calls", [])] == [
            "error" in c for c in theirs.get("tool_calls", [])
        ]
