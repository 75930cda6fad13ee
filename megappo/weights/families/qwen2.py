"""Qwen2 and Qwen2.5: a bias on queries, keys and values; small ones tie their embeddings."""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.decoder import ATTENTION, ENDS, MLP, QKV_BIAS, decoder_shape
from megappo.weights.families.table import Family
from megappo.weights.shape import ModelShape


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``; ValueError names what does not fit."""
    fields = ConfigFields(config, where)
    fields.no_sliding_window()
    fields.only("use_mrope", False)
    return decoder_shape(
        fields, "qwen2", value_head=value_head, max_position_embeddings=32768, qkv_bias=True
    )


FAMILY = Family(
    table=(*ATTENTION, QKV_BIAS, *MLP, *ENDS),
    translate=translate,
    value_architecture="Qwen2ForSequenceClassification",
)
