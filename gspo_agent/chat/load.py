"""From a model's directory or name to its chat."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from renderers import config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP, load_tokenizer

from gspo_agent.chat.base import Chat
from gspo_agent.chat.renderer import RendererChat
from gspo_agent.chat.template import TemplateChat
from gspo_agent.chat.text import SafeTokenizer
from gspo_agent.errors import ChatError
from gspo_agent.messages import Message, assistant, call, system, tool_result, user

logger = logging.getLogger(__name__)

FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "llama": ("llama-3",),
    "glm4_moe": ("glm-4.5",),
    "gpt_oss": ("gpt-oss",),
    "minimax_m2": ("minimax-m2",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
}
"""`model_type` -> renderers to try. One is taken only where it writes what the tokenizer's own template writes."""


def load_chat(model_path: str | Path) -> Chat:
    """The chat of the model at `model_path` (a directory or a hub name).

    Raises ChatError where there is no tokenizer or template, or none that can be used turn by turn.
    """
    name = str(model_path)
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ChatError(f"no model directory {name!r}")  # not a hub name either: do not wait for the network
    try:
        tokenizer = SafeTokenizer(load_tokenizer(name))
    except ChatError:
        raise
    except Exception as error:  # transformers raises whatever the files make it raise
        raise ChatError(
            f"no tokenizer can be loaded from {name!r} ({type(error).__name__}: {' '.join(str(error).split())}); "
            f"give a model directory with tokenizer.json, or a hub name"
        ) from error
    chat = _renderer_chat(name, tokenizer)
    if chat is None:
        if not tokenizer.inner.chat_template:
            raise ChatError(f"model {name!r} has no chat template; use an instruction-tuned model, or save one with it")
        chat = TemplateChat(tokenizer)
    _prove_text_stays_text(chat, tokenizer)
    return chat


def _renderer_chat(name: str, tokenizer: SafeTokenizer) -> Chat | None:
    if name in MODEL_RENDERER_MAP:
        return RendererChat(_renderer(MODEL_RENDERER_MAP[name], tokenizer), tokenizer)
    if not tokenizer.inner.chat_template:
        return None
    for family in FAMILIES.get(_model_type(name), ()):
        try:
            renderer = _renderer(family, tokenizer)
            if _agrees(renderer, tokenizer):
                return RendererChat(renderer, tokenizer)
        except Exception as error:  # a renderer of another family fails on whatever it misses first
            logger.info("%s: not the format of renderer %s: %r", name, family, error)
    return None


def _renderer(family: str, tokenizer: SafeTokenizer) -> Any:
    config: Any = config_from_name(family)
    return create_renderer(tokenizer, type(config)(thinking_retention="all"))


def _model_type(name: str) -> str:
    path = Path(name) / "config.json"
    if path.is_file():
        return str(json.loads(path.read_text()).get("model_type", ""))
    from transformers import AutoConfig  # only a hub name needs it

    return str(AutoConfig.from_pretrained(name).model_type)


def _agrees(renderer: Any, tokenizer: SafeTokenizer) -> bool:
    """Whether the renderer writes what the tokenizer's template writes."""
    tool: Any = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}
    inner: Any = tokenizer.inner
    cycle: list[Message] = [user("a"), assistant("b", [call("f", x="é")]), tool_result("c"), tool_result("d")]
    for messages in ([user("a")], [system("s"), user("a\n")], cycle, [*cycle, assistant("e"), user("f")]):
        for tools in (None, [tool]):
            theirs = inner.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            ours = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            if tokenizer.decode(ours) != theirs:
                return False
    return True


def _prove_text_stays_text(chat: Chat, tokenizer: SafeTokenizer) -> None:
    """Special tokens in a message or a tool's schema must add none to the ids."""
    control = frozenset(tokenizer.control_ids.values())
    hostile = "x".join(tokenizer.control_ids)

    def special(text: str) -> list[int]:
        token_ids = chat.open([user(text)], [])
        tail = chat.extend(token_ids, len(token_ids), [user(text)], []) or []
        return [token for token in token_ids + tail if token in control]

    if special(hostile) != special("x"):
        raise ChatError(f"in {tokenizer.name_or_path!r} the text of a message can become a special token")
