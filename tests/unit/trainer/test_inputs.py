"""Faults of models and prompts that are found before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config import load
from megappo.config.schema import Config
from megappo.device.platform import layer_implementation
from megappo.trainer.inputs import load_inputs
from tests.e2e.runs import flags, make_inputs
from tests.support.models import make_llama, make_model, make_tokenizer


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


@pytest.mark.parametrize("vocab", [20, 31, 40])
def test_c60_a_reward_model_with_another_models_tokenizer(tmp_path: Path, vocab: int) -> None:
    """Found on the first prompt, before any rank starts; one with its own small one is fine."""
    make_inputs(tmp_path)
    judge = make_model(tmp_path / "judge", "qwen3", layers=2, vocab=vocab, value_head=True)
    load_inputs(args_of(tmp_path, reward__model_name_or_path=judge))
    rows = [{"input": "zz=", "label": ""}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_tokenizer(101).save_pretrained(judge)
    with pytest.raises(ValueError, match=rf"judge: its tokenizer gives .*vocab_size = {vocab}"):
        load_inputs(args_of(tmp_path, reward__model_name_or_path=judge, data__max_samples=1))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_c30_dropout_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rate: float
) -> None:
    """It is never applied; whoever trained with it is told, once for each model that has it."""
    make_inputs(tmp_path, attention_dropout=rate)
    load_inputs(args_of(tmp_path))
    notes = [record.getMessage() for record in caplog.records]
    expected = f"{tmp_path / 'policy'}: attention_dropout = {rate} is taken for 0 in training"
    assert notes == ([expected] if rate else [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_layers_that_cannot_be_had(tmp_path: Path) -> None:
    """TransformerEngine's need CUDA; plain ones are what null means without it."""
    make_inputs(tmp_path)
    load_inputs(args_of(tmp_path, megatron__transformer_impl="local"))
    with pytest.raises(ValueError, match=r"transformer_impl = transformer_engine needs a CUDA"):
        load_inputs(args_of(tmp_path, megatron__transformer_impl="transformer_engine"))
    assert layer_implementation(None) == layer_implementation("local") == "local"


def test_what_is_no_reward_model(tmp_path: Path) -> None:
    """A language model; a mesh that cannot cut it; a chat without a template."""
    make_inputs(tmp_path)
    policy = tmp_path / "policy"
    with pytest.raises(ValueError, match=r"reward.model_name_or_path = .* has no score head"):
        load_inputs(args_of(tmp_path, reward__model_name_or_path=policy))
    judge = make_model(tmp_path / "judge", "qwen3", heads=3, kv_heads=3, layers=2, value_head=True)
    keys = {"megatron__world_size": 2, "megatron__tensor_model_parallel_size": 2}
    with pytest.raises(ValueError, match=r"^reward: .* = 2 does not divide .*heads = 3"):
        load_inputs(args_of(tmp_path, reward__model_name_or_path=judge, **keys))
    silent = make_tokenizer(101)
    silent.chat_template = None
    (judge / "chat_template.jinja").unlink(missing_ok=True)
    silent.save_pretrained(judge)
    with pytest.raises(ValueError, match="judge: its tokenizer has no chat template"):
        load_inputs(
            args_of(tmp_path, reward__model_name_or_path=judge, data__apply_chat_template=True)
        )


@pytest.mark.parametrize("eos", [101, [2, 500]])
def test_a_stop_token_beyond_the_vocabulary(tmp_path: Path, eos: int | list[int]) -> None:
    """The engine would only say so when it is asked to generate."""
    make_inputs(tmp_path, eos=eos)
    with pytest.raises(ValueError, match=r"eos_token_id (101|500) is not in the vocabulary of 101"):
        load_inputs(args_of(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ({}, 262144),
        ({"megatron__params_dtype": "bf16"}, 131072),
        ({"data__max_len": 128, "train__max_tokens_per_gpu": 256}, 262144),
        ({"data__max_len": 129, "train__max_tokens_per_gpu": 256}, 393216),
    ],
)
def test_a_cache_that_holds_no_sequence(
    tmp_path: Path, overrides: dict[str, Any], needed: int
) -> None:
    """2 layers, 2 key/value heads of 32: whole blocks of 128 tokens, and one that stays empty."""
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


MESHES: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"world_size": 8, "tensor_model_parallel_size": 8},
        r"actor: megatron.tensor_model_parallel_size = 8 .* num_attention_heads = 4",
    ),
    (
        "llama",
        {
            "world_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        r"actor: .* = 2 x 2 is more than the model's num_hidden_layers = 2",
    ),
    (
        "llama",
        {"world_size": 2, "expert_model_parallel_size": 2},
        r"megatron.expert_model_parallel_size = 2, but no model of this run has experts",
    ),
    (
        "qwen3_moe",
        {"world_size": 8, "expert_model_parallel_size": 8},
        r"actor: megatron.expert_model_parallel_size = 8 .* number of experts = 4",
    ),
    (
        "qwen3_moe",
        {"world_size": 2, "tensor_model_parallel_size": 2},
        r"actor: megatron.sequence_parallel = false, .* 4 experts .*size = 2 needs it",
    ),
]


@pytest.mark.parametrize(("family", "mesh", "message"), MESHES)
def test_a_mesh_that_does_not_cut_the_policy(
    tmp_path: Path, family: str, mesh: dict[str, Any], message: str
) -> None:
    """C8: the role, the key and both numbers, before any rank starts."""
    make_inputs(tmp_path)
    make_model(tmp_path / "policy", family, layers=2)
    with pytest.raises(ValueError, match=message):
        load_inputs(args_of(tmp_path, **{f"megatron__{key}": mesh[key] for key in mesh}))


def test_meshes_that_cut_unevenly_are_taken(tmp_path: Path) -> None:
    """One key/value head for two tensor ranks, five layers for four chunks."""
    make_inputs(tmp_path)
    make_model(tmp_path / "policy", "llama", layers=5, kv_heads=1)
    load_inputs(
        args_of(
            tmp_path,
            megatron__world_size=4,
            megatron__tensor_model_parallel_size=2,
            megatron__pipeline_model_parallel_size=2,
            megatron__virtual_pipeline_model_parallel_size=2,
        )
    )
