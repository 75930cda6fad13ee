"""A small byte-level tokenizer, and a writer of prompt files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte; ``</s>`` is 0 and nothing is added to a text."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    made.chat_template = CHAT_TEMPLATE
    return made


Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes lines (bytes as they are, anything else as JSON) to a prompt file."""

    def write_lines(*lines: Any, name: str = "prompts.jsonl", last_newline: bool = True) -> Path:
        encoded = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        path = tmp_path / name
        path.write_bytes(b"\n".join(encoded) + (b"\n" if last_newline else b""))
        return path

    return write_lines
