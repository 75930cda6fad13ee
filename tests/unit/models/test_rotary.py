"""Rotary frequencies equal transformers' bit for bit, and no dead model is kept alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megappo.models.rotary import PackedRotary, inverse_frequencies
from megappo.weights.shape import ModelShape

SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=101,
    tied=False,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=256,
)


def llama3(factor: float, low: float, high: float, original: int) -> dict[str, Any]:
    """A llama3 scaling as configurations write it."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (10000.0, None),
        (500000.0, None),
        (1e6, {"rope_type": "linear", "factor": 2.5}),
        (500000.0, llama3(8.0, 1.0, 4.0, 8192)),
        (500000.0, llama3(32.0, 1.0, 4.0, 8192)),
        (10000.0, llama3(4.0, 1.5, 3.0, 64)),
        (10000.0, llama3(2.0, 1.0, 8.0, 1024)),
    ],
)
def test_frequencies_equal_transformers(
    theta: float, scaling: dict[str, Any] | None, head_dim: int
) -> None:
    """Also where the low and high factors and the original length are not Llama 3's."""
    shape = replace(SHAPE, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    rope = {"rope_theta": theta, "rope_type": "default", **(scaling or {})}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(inverse_frequencies(shape), expected)


def test_unknown_scaling_is_refused() -> None:
    """A scaling that the formulas do not cover is an error by name."""
    shape = replace(SHAPE, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match="'yarn' is not supported"):
        inverse_frequencies(shape)


def test_rows_are_exactly_as_many_as_asked() -> None:
    """Megatron reads the rows differently when their number happens to be that of all tokens."""
    rotary = PackedRotary(inverse_frequencies(SHAPE), torch.device("cpu"))
    for length in (1, 5, 3, 64, 65, 2):
        angles = rotary(length)
        assert angles.shape == (length, 1, 1, SHAPE.head_dim)
        expected = torch.outer(torch.arange(length).float(), inverse_frequencies(SHAPE))
        assert torch.equal(angles[:, 0, 0], torch.cat((expected, expected), dim=-1))


def test_dead_embeddings_are_freed() -> None:
    """Nothing holds an embedding after its last reference, although it has run."""
    rotary = PackedRotary(inverse_frequencies(SHAPE), torch.device("cpu"))
    rotary(7)
    gone = weakref.ref(rotary)
    del rotary
    gc.collect()
    assert gone() is None
