"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.decoder import ATTENTION, ENDS, decoder_shape, experts
from megappo.weights.families.table import Family
from megappo.weights.shape import ModelShape


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``; ValueError names what does not fit."""
    fields = ConfigFields(config, where)
    return decoder_shape(
        fields,
        "mixtral",
        value_head=value_head,
        rope_theta=1e6,
        max_position_embeddings=131072,
        sliding_window=fields.optional_size("sliding_window", None),
        renormalized=True,
        **fields.experts(),
    )


FAMILY = Family(
    table=(*ATTENTION, *experts("block_sparse_moe", gate="w1", up="w3", down="w2"), *ENDS),
    translate=translate,
    value_architecture="MixtralForSequenceClassification",
)
