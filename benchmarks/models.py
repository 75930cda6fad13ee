"""Shapes of models of any family and about any size, for benchmarks on random weights."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from megappo.weights.canonical import canonical_tensors
from megappo.weights.families import FAMILIES
from megappo.weights.shape import ModelShape

HEAD_DIM = 64
KV_HEADS = 4
VOCAB = 16384
EXPERTS = 8


def num_parameters(shape: ModelShape) -> int:
    """Elements of all canonical tensors."""
    one, two = (
        sum(map(prod, canonical_tensors(replace(shape, num_layers=n)).values())) for n in (1, 2)
    )
    return one + (two - one) * (shape.num_layers - 1)


def shape_of(family: str, params: int) -> ModelShape:
    """The shape of a family whose number of parameters is nearest to ``params``.

    Hidden sizes are multiples of 256, so that tensor parallel sizes up to 4 divide the heads;
    there is about one layer for 64 of them, as is usual, and an even number.
    """
    shapes = (
        shape_with(family, hidden, layers)
        for hidden in range(256, 8193, 256)
        for layers in range(max(2, hidden // 64 - 4), hidden // 64 + 5, 2)
    )
    return min(shapes, key=lambda shape: abs(num_parameters(shape) - params))


def shape_with(family: str, hidden: int, layers: int, vocab: int = VOCAB) -> ModelShape:
    """The shape of a family with these sizes; the hidden one a multiple of 256."""
    experts = EXPERTS if any(row.place == "expert" for row in FAMILIES[family].table) else 0
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=hidden if experts else hidden * 8 // 3 // 64 * 64,
        num_heads=hidden // HEAD_DIM,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=vocab,
        tied=False,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=4096,
        num_experts=experts,
        experts_per_token=2 if experts else 0,
    )
