"""One small Qwen3-style model directory for the whole session."""

import re
from pathlib import Path
from typing import Any

import pytest

from gspo_agent.chat import RendererChat, TemplateChat, load_chat
from gspo_agent.config import ColdStart
from gspo_agent.messages import Message, assistant, call, system, tool_result, user
from gspo_agent.tiny import CONTROL_TOKENS, MARKUP_TOKENS, make_config, render, train_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run Python.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


def demonstration(a: int, b: int) -> list[Message]:
    return [
        system("You solve problems."),
        user(f"What is {a} * {b}?"),
        assistant("", [call("python", code=f"print({a} * {b})")]),
        tool_result(str(a * b)),
        assistant(f"The answer is {a * b}."),
    ]


def letter_by_letter(chat: RendererChat | TemplateChat, text: str) -> list[int]:
    """Ids that decode to `text` and are not those that the tokenizer gives it; marks stay whole."""
    marks = "|".join(map(re.escape, CONTROL_TOKENS + MARKUP_TOKENS))
    pieces = [piece for part in re.split(f"({marks})", text) for piece in ([part] if re.match(marks, part) else part)]
    ids = [token for piece in pieces for token in chat.tokenizer.encode(piece)]
    assert chat.tokenizer.decode(ids) == text
    assert ids != chat.tokenizer.encode(text)
    return ids


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "my-model"
    texts = [render(demonstration(a, b), TOOLS) for a in range(11, 40) for b in (12, 57)]
    tokenizer = train_tokenizer(texts, 700, path)
    make_config(ColdStart(), len(tokenizer)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chat(model_path: Path) -> RendererChat:
    chat = load_chat(model_path)
    assert isinstance(chat, RendererChat)
    return chat
