import json
import shutil
from pathlib import Path

import pytest

from gspo_agent.chat import RendererChat, TemplateChat, load_chat
from gspo_agent.errors import ChatError
from gspo_agent.messages import user
from tests.chat.test_template import STRIPS_THINKING, TEMPLATE


def variant(model_path: Path, tmp_path: Path, template: str | None) -> Path:
    path = tmp_path / "variant"
    shutil.copytree(model_path, path)
    (path / "chat_template.jinja").unlink()
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_a_family_is_known_by_its_config_not_by_its_name(model_path: Path) -> None:
    assert "qwen" not in model_path.name.lower()
    assert isinstance(load_chat(str(model_path)), RendererChat)


def test_a_fine_tune_with_another_template_is_not_taken_for_its_family(model_path: Path, tmp_path: Path) -> None:
    chat = load_chat(variant(model_path, tmp_path, TEMPLATE))
    assert isinstance(chat, TemplateChat)
    assert chat.open([user("x")], [])


def test_an_unknown_architecture_with_the_same_template_goes_by_difference_and_is_refused(
    model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other"
    shutil.copytree(model_path, path)
    config = json.loads((path / "config.json").read_text()) | {"model_type": "gpt2"}
    (path / "config.json").write_text(json.dumps(config))
    # Qwen3's template strips thinking from earlier turns: without the renderer there is no stable prefix.
    with pytest.raises(ChatError, match="chat template of"):
        load_chat(path)


def test_a_model_without_a_template_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="has no chat template; use an instruction-tuned model"):
        load_chat(variant(model_path, tmp_path, None))


def test_a_template_that_strips_thinking_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="use a model of a family"):
        load_chat(variant(model_path, tmp_path, STRIPS_THINKING))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"no tokenizer can be loaded from .*give a model directory"):
        load_chat(tmp_path)
    with pytest.raises(ChatError, match="no model directory"):
        load_chat(tmp_path / "nowhere")
