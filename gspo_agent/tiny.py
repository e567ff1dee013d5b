"""A tokenizer and a configuration for models that learn on a CPU: Qwen3's special tokens, chat format, architecture.

>>> texts = [render(messages, tools) for messages, tools in demonstrations]
>>> tokenizer = train_tokenizer(texts, 1024, "model")
>>> config = make_config(ColdStart(), len(tokenizer))
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config
from transformers.utils.chat_template_utils import render_jinja_template

from gspo_agent.config import ColdStart
from gspo_agent.errors import ConfigError
from gspo_agent.messages import Message

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Special in Qwen3's tokenizer."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens in Qwen3's tokenizer, but not special: `decode(skip_special_tokens=True)` shows them."""

_ASSISTANT = "assistant\n"
_WHOLE_PIECE_CHARS = 24
_WHOLE_PIECE_SHARE = 0.1
_MAX_WHOLE_PIECES = 32

CHAT_TEMPLATE = r"""
{%- set first = messages[0] if messages else {} %}
{%- set preamble = first.content if first.role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if first.role == 'system' %}{{- preamble + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\n' + preamble + '<|im_end|>\n' }}
{%- endif %}
{%- set query = namespace(last=messages | length - 1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set text = message.content.strip() %}
    {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
        {%- set query.last = messages.index(message) %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = namespace(text=message.reasoning_content or '') %}
        {%- if not message.reasoning_content and '</think>' in content %}
            {%- set thought.text = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>', 1)[1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > query.last and (loop.last or thought.text) %}
            {{- '<think>\n' + thought.text.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if not loop.first or content }}
            {%- set function = call.function or call %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem is undefined or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
""".strip()
"""Writes what Qwen3's own template writes."""


def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """A whole conversation as text, to train a tokenizer on; needs no tokenizer itself."""
    conversation: Any = [list(messages)]
    rendered = render_jinja_template(conversation, tools=list(tools) or None, chat_template=CHAT_TEMPLATE)[0]
    # The template gives the last turn an empty thinking block; `Chat.conversation` gives none to any turn.
    return str(rendered[0]).replace("<think>\n\n</think>\n\n", "")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, directory: str | Path, *, merge_numbers: int = 2
) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE on rendered conversations and saves it, with the chat template, to `directory`.

    Numbers are cut into groups of at most `merge_numbers` digits, each one token. Everything else may merge across
    words, so that fixed texts cost few tokens; long texts outside the assistant's turns that many conversations share
    (the tool prompt) become one token each. The same texts give the same ids.
    """
    texts = list(texts)
    shared = _shared_pieces(texts)
    numbers = [str(n).zfill(digits) for digits in range(2, merge_numbers + 1) for n in range(10**digits)]
    special = [*CONTROL_TOKENS, *MARKUP_TOKENS]
    room = vocab_size - len(numbers) - len(shared) - len(special)
    if merge_numbers < 1 or room < 256:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: bytes, special tokens, shared texts and numbers of up to "
            f"{merge_numbers} digits take {vocab_size - room + 256}; raise cold_start.vocab_size"
        )
    trained = _train(texts, shared, room)
    vocab, merges = trained["model"]["vocab"], trained["model"]["merges"]
    for number in numbers:
        vocab[number] = len(vocab)
        merges.append([number[:-1], number[-1]])
    for piece in shared:
        vocab.setdefault(_byte_level(piece), len(vocab))
    trained["model"]["ignore_merges"] = True  # a piece that is in the vocabulary whole needs no merges
    trained["pre_tokenizer"] = json.loads(_backend(merge_numbers).to_str())["pre_tokenizer"]
    backend = Tokenizer.from_str(json.dumps(trained))
    # Last, as in Qwen3, and outside the BPE vocabulary: there a text that looks like one would become one.
    backend.add_tokens([AddedToken(token, normalized=False, special=token in CONTROL_TOKENS) for token in special])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_config(section: ColdStart, vocab_size: int) -> Qwen3Config:
    """Qwen3's architecture in the sizes of `section`, with tied embeddings, for a tokenizer of `train_tokenizer`
    with `vocab_size` = `len(tokenizer)`."""
    special = vocab_size - len(CONTROL_TOKENS) - len(MARKUP_TOKENS)
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=section.hidden_size,
        intermediate_size=section.ffn_size,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=section.kv_heads,
        head_dim=section.hidden_size // section.heads,
        max_position_embeddings=section.context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=special + CONTROL_TOKENS.index(TURN_END),
        pad_token_id=special + CONTROL_TOKENS.index(END_OF_TEXT),
        dtype="float32",
    )


def _backend(merge_numbers: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"[0-9]{{1,{merge_numbers}}}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(texts: Sequence[str], shared: Sequence[str], vocab_size: int) -> Any:
    """The trained tokenizer as its JSON."""
    tokenizer = _backend(merge_numbers=1)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    whole = set(shared)
    # What becomes one token anyway must not use up the merges; once is enough to stay readable when it varies.
    feed = [piece for text in texts for piece, _ in _pieces(text) if piece not in whole] + list(shared)
    tokenizer.train_from_iterator(feed, trainer)
    return json.loads(tokenizer.to_str())


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The text between special tokens, cut at numbers, and whether it belongs to an assistant's turn."""
    special = "|".join(map(re.escape, (*CONTROL_TOKENS, *MARKUP_TOKENS)))
    written = False
    for part in re.split(f"({special})", text):
        if part == TURN_START:
            written = False
        elif part and not re.fullmatch(special, part):
            if part.startswith(_ASSISTANT):  # the prompt ends here: nothing merges across it
                written, part = True, part.removeprefix(_ASSISTANT)
                yield _ASSISTANT, False
            yield from ((piece, written) for piece in re.split("([0-9]+)", part) if piece)


def _shared_pieces(texts: Sequence[str]) -> list[str]:
    counts = Counter(
        piece for text in texts for piece, written in _pieces(text) if not written and len(piece) >= _WHOLE_PIECE_CHARS
    )
    often = [(piece, n) for piece, n in counts.items() if n >= max(2, _WHOLE_PIECE_SHARE * len(texts))]
    often.sort(key=lambda item: (-item[1] * len(item[0]), item[0]))
    return [piece for piece, _ in often[:_MAX_WHOLE_PIECES]]


def _byte_level(text: str) -> str:
    """`text` as byte-level BPE spells it in its vocabulary."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in spelling.pre_tokenize_str(text))
