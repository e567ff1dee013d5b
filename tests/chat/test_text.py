from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo_agent.chat import RendererChat
from gspo_agent.chat.text import SafeTokenizer
from gspo_agent.errors import ChatError
from gspo_agent.tiny import CONTROL_TOKENS, MARKUP_TOKENS

TOKENS = CONTROL_TOKENS + MARKUP_TOKENS
FRAGMENTS = st.lists(
    st.sampled_from(
        [*TOKENS, *(t[:3] for t in TOKENS), *(t[3:] for t in TOKENS), "<", ">", "|", "\n", "7", "é", "\ufdd0"]
    ),
    min_size=1,
    max_size=6,
).map("".join)


def make(tokenizer: Tokenizer) -> SafeTokenizer:
    fast: Any = PreTrainedTokenizerFast
    return SafeTokenizer(fast(tokenizer_object=tokenizer))


@given(text=FRAGMENTS)
def test_text_never_becomes_a_special_token(chat: RendererChat, text: str) -> None:
    tokenizer = chat.tokenizer
    ids = tokenizer.encode(tokenizer.guard(text))
    assert not set(ids) & set(tokenizer.control_ids.values())
    assert tokenizer.decode(ids) == text.replace("\ufdd0", "\ufffd")


@given(before=FRAGMENTS, text=FRAGMENTS, after=FRAGMENTS)
def test_markup_around_a_text_cannot_complete_it(chat: RendererChat, before: str, text: str, after: str) -> None:
    tokenizer = chat.tokenizer
    control = set(tokenizer.control_ids.values())
    special = [i for i in tokenizer.encode(before) if i in control] + [
        i for i in tokenizer.encode(after) if i in control
    ]
    ids = tokenizer.encode(before + tokenizer.guard(text) + after)
    assert [i for i in ids if i in control] == special


@pytest.mark.parametrize("token", TOKENS)
def test_half_a_special_token_is_not_completed_by_the_other_half(chat: RendererChat, token: str) -> None:
    tokenizer = chat.tokenizer
    for cut in range(1, len(token)):
        for text in (tokenizer.guard(token[:cut]) + token[cut:], token[:cut] + tokenizer.guard(token[cut:])):
            assert tokenizer.control_ids[token] not in tokenizer.encode(text)


@given(text=FRAGMENTS)
def test_markup_is_tokenised_as_the_tokenizer_does_it(chat: RendererChat, text: str) -> None:
    text = text.replace("\ufdd0", "")
    assert chat.tokenizer.encode(text) == chat.tokenizer.inner.encode(text, add_special_tokens=False)


def test_a_caller_may_change_the_ids_it_got(chat: RendererChat) -> None:
    first = chat.tokenizer.encode("assistant\n")
    expected = list(first)
    first.append(0)
    assert chat.tokenizer.encode("assistant\n") == expected


def test_half_a_surrogate_pair_does_not_stop_an_episode(chat: RendererChat) -> None:
    assert chat.tokenizer.decode(chat.tokenizer.encode(chat.tokenizer.guard("a\ud800b"))) == "a\ufffdb"


def test_special_tokens_inside_the_vocabulary_are_cut() -> None:
    vocab = {letter: i for i, letter in enumerate("abc<>")} | {"<a>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.add_special_tokens([AddedToken("<a>")])
    tokenizer = make(backend)
    assert tokenizer.encode("b<a>c") == [1, 5, 2]
    assert tokenizer.encode(tokenizer.guard("<a>")) == [3, 0, 4]
    assert tokenizer.encode(tokenizer.guard("b<a>c")) == [1, 3, 0, 4, 2]


def test_blanks_that_a_special_token_swallows_are_swallowed() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, " ": 1, "b": 2}, merges=[]))
    backend.add_special_tokens([AddedToken("<end>", rstrip=True)])
    tokenizer = make(backend)
    for text in ("a <end>  b", "a<end>b", "<end>"):
        assert tokenizer.encode(text) == tokenizer.inner.encode(text, add_special_tokens=False)


def test_a_single_character_as_added_token_is_refused() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_special_tokens(["§"])
    with pytest.raises(ChatError, match="'§'"):
        make(backend)


def test_offsets_are_not_offered(chat: RendererChat) -> None:
    assert not callable(getattr(chat.tokenizer, "__call__", None))  # noqa: B004


def test_blank_runs_are_text() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, " ": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    backend.add_tokens(["    "])
    assert make(backend).control_ids == {}


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    class Slow:
        name_or_path = "slow"

    with pytest.raises(ChatError, match=r"not a fast tokenizer; save it with a tokenizer.json"):
        SafeTokenizer(Slow())  # type: ignore[arg-type]
