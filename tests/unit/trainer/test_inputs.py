"""Faults of models and prompts that are found before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.config import load
from megappo.config.schema import Config
from megappo.trainer.inputs import load_inputs
from tests.e2e.runs import flags, make_inputs
from tests.support.models import make_llama, make_tokenizer


def args_of(folder: Path, **overrides: Any) -> Config:
    """The configuration that ``make_inputs`` wrote, with some keys changed."""
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    argv = ["--config", str(folder / "ppo.yaml"), "--output_dir", str(folder / "out")]
    return load([*argv, *flags(keys)])


@pytest.mark.parametrize("character", ["k", "z", "~"])
def test_a_prompt_token_beyond_the_vocabulary(tmp_path: Path, character: str) -> None:
    """A tokenizer of another model: the line, the token and both files are named."""
    make_inputs(tmp_path)
    make_llama(tmp_path / "policy", layers=2, vocab=32)
    make_tokenizer(101).save_pretrained(tmp_path / "policy")
    rows = [{"input": text, "label": ""} for text in ("1+1=", f"1{character}")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: the tokenizer gives token \d+, but"):
        load_inputs(args_of(tmp_path))


@pytest.mark.parametrize("eos", [101, [2, 500]])
def test_a_stop_token_beyond_the_vocabulary(tmp_path: Path, eos: int | list[int]) -> None:
    """The engine would only say so when it is asked to generate."""
    make_inputs(tmp_path, eos=eos)
    with pytest.raises(ValueError, match=r"eos_token_id (101|500) is not in the vocabulary of 101"):
        load_inputs(args_of(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [({}, 32768), ({"megatron__params_dtype": "bf16"}, 16384), ({"data__max_len": 64}, 65536)],
)
def test_a_cache_that_holds_no_sequence(
    tmp_path: Path, overrides: dict[str, Any], needed: int
) -> None:
    """2 layers, 2 key/value heads of 32: the bytes of one longest sequence are the least."""
    make_inputs(tmp_path)
    load_inputs(args_of(tmp_path, vllm__kv_cache_memory_bytes=needed, **overrides))
    with pytest.raises(ValueError, match=rf"kv_cache_memory_bytes = .* at least {needed}"):
        load_inputs(args_of(tmp_path, vllm__kv_cache_memory_bytes=needed - 1, **overrides))


def test_a_critic_with_a_shorter_context(tmp_path: Path) -> None:
    """As for the policy, the longest sample must fit."""
    make_inputs(tmp_path)
    critic = make_llama(tmp_path / "critic", layers=2, value_head=True, max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"data.max_len = 32 is more than the critic's .* = 16"):
        load_inputs(args_of(tmp_path, critic__model_name_or_path=critic))
