"""Mistral 7B and its like: Llama's weights, with a sliding window over all layers or none."""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.decoder import ATTENTION, ENDS, MLP, decoder_shape
from megappo.weights.families.table import Family
from megappo.weights.shape import ModelShape


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``; ValueError names what does not fit."""
    fields = ConfigFields(config, where)
    return decoder_shape(
        fields,
        "mistral",
        value_head=value_head,
        max_position_embeddings=131072,
        sliding_window=fields.optional_size("sliding_window", 4096),
    )


FAMILY = Family(
    table=(*ATTENTION, *MLP, *ENDS),
    translate=translate,
    value_architecture="MistralForSequenceClassification",
)
