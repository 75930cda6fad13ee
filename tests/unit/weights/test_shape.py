"""From config.json to a shape: what is understood, what is harmless, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.weights.families import load_shape, shape_from_config
from tests.support.models import make_llama

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 101,
}


def test_defaults_are_those_of_transformers() -> None:
    """Fields that config.json leaves out have transformers' defaults."""
    shape = shape_from_config(BASE)
    assert (shape.num_kv_heads, shape.head_dim, shape.tied) == (4, 16, False)
    assert (shape.norm_eps, shape.rope_theta, shape.rope_scaling) == (1e-6, 1e4, None)
    assert (shape.max_position_embeddings, shape.value_head) == (2048, False)


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    """What save_pretrained of the installed version writes is understood, field by field."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    folder = make_llama(tmp_path, tied=True, vocab=96, layers=2, rope=rope, eos=[2, 7])
    shape = load_shape(folder)
    assert (shape.hidden_size, shape.ffn_hidden_size, shape.num_layers) == (64, 96, 2)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 32)
    assert (shape.vocab_size, shape.tied, shape.value_head) == (96, True, False)
    assert (shape.rope_theta, shape.rope_scaling) == (5e5, {"rope_type": "llama3", **LLAMA3})


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 1e6}, 1e6, None),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, None),
        ({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}, 2e4, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            1e4,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4}},
            5e5,
            {"rope_type": "linear", "factor": 4},
        ),
    ],
)
def test_rope_of_old_and_new_files(
    fields: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    """Both ways of writing the rotary embedding give the same shape."""
    shape = shape_from_config(BASE | fields)
    assert (shape.rope_theta, shape.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"logits_scaling": 8.0, "attention_multiplier": 2}, "attention_multiplier = 2, logits"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported, only llama, mistral"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of .* = 3"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, found '1e-5'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, found 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor must be"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 2e4}, "rope_theta is 20000"),
        ({"rope_parameters": [1]}, "must be objects"),
    ],
)
def test_what_is_not_understood_is_named(fields: dict[str, Any], words: str) -> None:
    """No field of the model is ever ignored; the error names it and the file."""
    with pytest.raises(ValueError, match=words) as error:
        shape_from_config(BASE | fields, where="m/config.json")
    assert str(error.value).startswith("m/config.json: ")
    assert "\n" not in str(error.value)


def test_fields_that_change_no_logit_are_harmless() -> None:
    """SmolLM2's and other people's bookkeeping does not stop a run."""
    harmless = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4": "float16"}},
        "attention_dropout": 0.1,
        "use_cache": False,
        "torch_dtype": "bfloat16",
        "_name_or_path": "somewhere",
        "eos_token_id": [2, 7],
    }
    assert shape_from_config(BASE | harmless) == shape_from_config(BASE)


def test_value_head_is_seen_and_must_be_scalar(tmp_path: Path) -> None:
    """A checkpoint with ``score.weight`` is a value model; one with two labels is refused."""
    folder = make_llama(tmp_path, layers=2, value_head=True)
    assert load_shape(folder).value_head
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.zeros(2, 64)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"score\.weight has shape \(2, 64\).*num_labels = 1"):
        load_shape(folder)


def test_broken_json_is_named(tmp_path: Path) -> None:
    """A cut-off config.json is one line with its path."""
    folder = make_llama(tmp_path, layers=1)
    text = (folder / "config.json").read_text()
    for broken in (text[:40], "[]", json.dumps(text)):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ValueError, match=r"config\.json (is not valid JSON|holds a)"):
            load_shape(folder)
