import random
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from gspo_agent.config import ColdStart
from gspo_agent.errors import ConfigError
from gspo_agent.tiny import CONTROL_TOKENS, MARKUP_TOKENS, make_config, render, train_tokenizer
from tests.chat.conftest import TOOLS, demonstration

TEXTS = [render(demonstration(a, b), TOOLS) for a in range(11, 40) for b in (12, 57)]


def test_the_saved_tokenizer_is_the_trained_one(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 700, tmp_path)
    make_config(ColdStart(), len(trained)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()
    assert loaded.decode(loaded.encode(TEXTS[0])) == TEXTS[0]
    assert loaded.chat_template == trained.chat_template
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert loaded.encode(token) == [loaded.convert_tokens_to_ids(token)]
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "qwen3"
    assert config.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")
    assert config.pad_token_id == loaded.convert_tokens_to_ids("<|endoftext|>")


def test_the_same_texts_give_the_same_ids(tmp_path: Path) -> None:
    first = train_tokenizer(TEXTS, 700, tmp_path / "a").backend_tokenizer.to_str()
    assert train_tokenizer(iter(TEXTS), 700, tmp_path / "b").backend_tokenizer.to_str() == first


@pytest.mark.parametrize(("digits", "pieces"), [(1, list("90817")), (2, ["90", "81", "7"]), (3, ["908", "17"])])
def test_numbers_are_cut_into_groups_of_digits(tmp_path: Path, digits: int, pieces: list[str]) -> None:
    tokenizer = train_tokenizer(TEXTS, 2000, tmp_path, merge_numbers=digits)
    for around in ("{}", "x{}y", "a {} b"):
        ids = tokenizer.encode(around.format("90817"))
        assert [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).isdigit()] == pieces


def test_a_shared_prompt_is_one_token_and_a_changed_one_is_still_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 700, tmp_path)
    prompt = TEXTS[0].split("<tool_call>")[0].removeprefix("<|im_start|>")
    assert "# Tools" in prompt
    assert len(tokenizer.encode(prompt)) == 1
    changed = prompt.replace("python", "perl")
    assert len(tokenizer.encode(changed)) > 1
    assert tokenizer.decode(tokenizer.encode(changed)) == changed


def test_what_the_assistant_writes_is_never_one_shared_token(tmp_path: Path) -> None:
    phrase = "a long fixed phrase of the assistant in every text"
    texts = [render([*demonstration(a, 12)[:-1], {"role": "assistant", "content": phrase}]) for a in range(11, 31)]
    tokenizer = train_tokenizer(texts, 400, tmp_path)
    assert len(tokenizer.encode(phrase)) > 1


def test_any_bytes_survive(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS[:2], 420, tmp_path)
    generator = random.Random(0)
    text = "".join(chr(generator.randrange(32, 0xD800)) for _ in range(500))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size 300 is too small"):
        train_tokenizer(TEXTS, 300, tmp_path)
