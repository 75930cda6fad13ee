"""Qwen3 with experts in every layer: Qwen3-30B-A3B, Qwen3-235B-A22B."""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.decoder import (
    ATTENTION,
    ENDS,
    K_NORM,
    Q_NORM,
    decoder_shape,
    experts,
)
from megappo.weights.families.table import Family
from megappo.weights.shape import ModelShape


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``; ValueError names what does not fit."""
    fields = ConfigFields(config, where)
    fields.only("attention_bias", False)
    fields.no_sliding_window()
    # Experts in every layer: dense layers among them would need tables of their own.
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [], None)
    fields.size("intermediate_size", 1)  # of the dense layers that there are not
    return decoder_shape(
        fields,
        "qwen3_moe",
        value_head=value_head,
        ffn="moe_intermediate_size",
        max_position_embeddings=32768,
        qk_norm=True,
        renormalized=fields.flag("norm_topk_prob", False),
        **fields.experts(),
    )


FAMILY = Family(
    table=(
        *ATTENTION,
        Q_NORM,
        K_NORM,
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *ENDS,
    ),
    translate=translate,
    value_architecture="Qwen3MoeForSequenceClassification",
)
