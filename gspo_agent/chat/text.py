"""A tokenizer in which the text of a message cannot become a special token.

Renderers and templates join their own markup and the text of messages into one string before it is tokenised. So
whatever in a text looks like a special token is first interspersed with a character that Unicode keeps for internal
use; `encode` looks up what is still in one piece, and takes that character away.
"""

from __future__ import annotations

import functools
import re
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from gspo_agent.errors import ChatError
from gspo_agent.messages import Message

_MARK = "\ufdd0"  # a noncharacter: never valid in interchanged text
_SURROGATES = re.compile("[\ud800-\udfff]")
_KEPT_CHARS, _KEPT = 4096, 512  # pieces of markup come again with every turn, system prompts with every episode


class SafeTokenizer:
    """What `renderers` needs of a tokenizer, over a fast tokenizer of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.name_or_path = str(tokenizer.name_or_path)
        if backend is None:
            raise ChatError(f"tokenizer {self.name_or_path!r} is not a fast tokenizer; save it with a tokenizer.json")
        self.inner = tokenizer
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.vocab_size = len(cast(Any, tokenizer))
        added = {int(i): token for i, token in cast(Any, tokenizer).added_tokens_decoder.items()}
        # Special or not: Qwen3's <tool_call> is markup all the same. Runs of blanks are text.
        self.control_ids = {token.content: i for i, token in added.items() if token.content.strip()}
        self._control = frozenset(self.control_ids.values())
        single = next((token for token in self.control_ids if len(token) == 1), None)
        if single is not None:
            raise ChatError(
                f"tokenizer {self.name_or_path!r} has the single character {single!r} as an added token, so text with "
                f"that character cannot be told from markup; remove it from the tokenizer's added tokens"
            )
        self._backend, self._plain = backend, _without_added_tokens(backend)
        self._encode_known = functools.lru_cache(maxsize=_KEPT)(self._encode)
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._looks_special = re.compile("|".join([*map(re.escape, longest_first), _MARK]))
        self._beginnings = tuple({token[:end] for token in longest_first for end in range(1, len(token))})
        self._endings = tuple({token[start:] for token in longest_first for start in range(1, len(token))})
        blanks = {token.content: (r"\s*" * token.lstrip, r"\s*" * token.rstrip) for token in added.values()}
        self._markup = re.compile(
            "|".join(f"{blanks[token][0]}({re.escape(token)}){blanks[token][1]}" for token in longest_first) or "(?!)"
        )

    def __getattr__(self, name: str) -> Any:
        # `__call__` stays hidden: with it renderers would ask for character offsets, which marks would shift.
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def guard(self, text: str) -> str:
        """Marks `text` for `encode`. U+FDD0 itself becomes U+FFFD, and so do halves of surrogate pairs."""
        if not text.isascii():
            text = _SURROGATES.sub("\ufffd", text)
        text = self._looks_special.sub(_mark, text)
        # Markup around the text could complete what it begins or ends with.
        if text.endswith(self._beginnings):
            text += _MARK
        if text.startswith(self._endings):
            text = _MARK + text
        return text

    def guard_json(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, dict):
            return {self.guard(key): self.guard_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_json(item) for item in value]
        return value

    def guard_messages(self, messages: list[Message]) -> list[Any]:
        return [
            {key: value if key in ("role", "outcome") else self.guard_json(value) for key, value in message.items()}
            for message in messages
        ]

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return list(self._encode_known(text)) if len(text) <= _KEPT_CHARS else self._encode(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of the tokens as they are: no spaces are taken out before punctuation."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        known = self.control_ids.get(tokens) if isinstance(tokens, str) else None
        return self.inner.convert_tokens_to_ids(tokens) if known is None else known

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        end = 0
        for match in self._markup.finditer(text):
            token_ids += self._encode_plain(text[end : match.start()])
            token_ids.append(self.control_ids[match[match.lastindex or 0]])
            end = match.end()
        return token_ids + self._encode_plain(text[end:])

    def _encode_plain(self, text: str) -> list[int]:
        text = text.replace(_MARK, "")
        if not text:
            return []
        encoding = self._plain.encode(text, add_special_tokens=False)
        if self._control.isdisjoint(encoding.ids):
            return list(encoding.ids)
        # A vocabulary that holds special tokens as ordinary pieces: cut the text inside the piece.
        start, end = next(span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in self._control)
        if end - start < 2:
            raise ChatError(f"tokenizer {self.name_or_path!r} reads the text {text[start:end]!r} as a special token")
        middle = (start + end) // 2
        return self._encode_plain(text[:middle]) + self._encode_plain(text[middle:])


def _mark(match: re.Match[str]) -> str:
    return "\ufffd" if match[0] == _MARK else _MARK + _MARK.join(match[0]) + _MARK


def _without_added_tokens(backend: Any) -> Tokenizer:
    plain = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    return plain
