"""Qwen3, dense: RMSNorm on queries and keys, and a head width of its own."""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.decoder import (
    ATTENTION,
    ENDS,
    K_NORM,
    MLP,
    Q_NORM,
    decoder_shape,
)
from megappo.weights.families.table import Family
from megappo.weights.shape import ModelShape


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``; ValueError names what does not fit."""
    fields = ConfigFields(config, where)
    fields.only("attention_bias", False)
    fields.no_sliding_window()
    return decoder_shape(
        fields,
        "qwen3",
        value_head=value_head,
        head_dim=128,
        max_position_embeddings=32768,
        qk_norm=True,
    )


FAMILY = Family(
    table=(*ATTENTION, Q_NORM, K_NORM, *MLP, *ENDS),
    translate=translate,
    value_architecture="Qwen3ForSequenceClassification",
)
