"""Llama 2 and 3, SmolLM2, and whatever else is ``model_type: llama``."""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.decoder import ATTENTION, ENDS, MLP, decoder_shape
from megappo.weights.families.table import Family
from megappo.weights.shape import ModelShape


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``; ValueError names what does not fit."""
    fields = ConfigFields(config, where)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("pretraining_tp", 1)
    fields.only("rope_interleaved", False)
    return decoder_shape(fields, "llama", value_head=value_head)


FAMILY = Family(
    table=(*ATTENTION, *MLP, *ENDS),
    translate=translate,
    value_architecture="LlamaForSequenceClassification",
)
