"""What the families have in common: the rows of a pre-norm decoder, and its configuration.

A family file picks rows and adds its own; ``decoder_shape`` translates the fields that all
families share, and a family passes what is special about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.table import Parameter
from megappo.weights.shape import ModelShape

LAYER = "model.layers.{layer}"
MEGATRON = "decoder.layers.{layer}"

EMBEDDING = Parameter(
    canonical=("model.embed_tokens.weight",),
    dims=(("vocab", "hidden"),),
    megatron="embedding.word_embeddings.weight",
    vllm="model.embed_tokens.weight",
    place="embedding",
    split=0,
)
INPUT_NORM = Parameter(
    canonical=(f"{LAYER}.input_layernorm.weight",),
    dims=(("hidden",),),
    megatron=f"{MEGATRON}.input_layernorm.weight",
    vllm=f"{LAYER}.input_layernorm.weight",
    place="layer",
)
QKV = Parameter(
    canonical=tuple(f"{LAYER}.self_attn.{x}_proj.weight" for x in "qkv"),
    dims=(("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
    megatron=f"{MEGATRON}.self_attention.linear_qkv.weight",
    vllm=f"{LAYER}.self_attn.qkv_proj.weight",
    place="layer",
    fusion="qkv",
    split=0,
)
QKV_BIAS = Parameter(
    canonical=tuple(f"{LAYER}.self_attn.{x}_proj.bias" for x in "qkv"),
    dims=(("q",), ("kv",), ("kv",)),
    megatron=f"{MEGATRON}.self_attention.linear_qkv.bias",
    vllm=f"{LAYER}.self_attn.qkv_proj.bias",
    place="layer",
    fusion="qkv",
    split=0,
)
Q_NORM, K_NORM = (
    Parameter(
        canonical=(f"{LAYER}.self_attn.{x}_norm.weight",),
        dims=(("head",),),
        megatron=f"{MEGATRON}.self_attention.{x}_layernorm.weight",
        vllm=f"{LAYER}.self_attn.{x}_norm.weight",
        place="layer",
    )
    for x in "qk"
)
O_PROJ = Parameter(
    canonical=(f"{LAYER}.self_attn.o_proj.weight",),
    dims=(("hidden", "q"),),
    megatron=f"{MEGATRON}.self_attention.linear_proj.weight",
    vllm=f"{LAYER}.self_attn.o_proj.weight",
    place="layer",
    split=1,
)
POST_NORM = Parameter(
    canonical=(f"{LAYER}.post_attention_layernorm.weight",),
    dims=(("hidden",),),
    megatron=f"{MEGATRON}.pre_mlp_layernorm.weight",
    vllm=f"{LAYER}.post_attention_layernorm.weight",
    place="layer",
)
GATE_UP = Parameter(
    canonical=(f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
    dims=(("ffn", "hidden"), ("ffn", "hidden")),
    megatron=f"{MEGATRON}.mlp.linear_fc1.weight",
    vllm=f"{LAYER}.mlp.gate_up_proj.weight",
    place="layer",
    fusion="gate_up",
    split=0,
)
DOWN = Parameter(
    canonical=(f"{LAYER}.mlp.down_proj.weight",),
    dims=(("hidden", "ffn"),),
    megatron=f"{MEGATRON}.mlp.linear_fc2.weight",
    vllm=f"{LAYER}.mlp.down_proj.weight",
    place="layer",
    split=1,
)
FINAL_NORM = Parameter(
    canonical=("model.norm.weight",),
    dims=(("hidden",),),
    megatron="decoder.final_layernorm.weight",
    vllm="model.norm.weight",
    place="final",
)
LM_HEAD = Parameter(
    canonical=("lm_head.weight",),
    dims=(("vocab", "hidden"),),
    megatron="output_layer.weight",
    vllm="lm_head.weight",
    place="lm_head",
    split=0,
)
VALUE_HEAD = Parameter(
    canonical=("score.weight",),
    dims=(("one", "hidden"),),
    megatron="output_layer.weight",
    vllm=None,
    place="value_head",
)
ATTENTION = (INPUT_NORM, QKV, O_PROJ)
MLP = (POST_NORM, GATE_UP, DOWN)
ENDS = (EMBEDDING, FINAL_NORM, LM_HEAD, VALUE_HEAD)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Parameter, ...]:
    """The rows of a layer's norm, router and gated experts.

    Args:
        block: Name of the expert block in a layer, ``mlp``, say; both in files and in vLLM.
        gate: Name of an expert's gate projection in files.
        up: Of its up projection.
        down: Of its down projection.
    """
    expert = f"{LAYER}.{block}.experts.{{expert}}"
    local = f"{MEGATRON}.mlp.experts.local_experts.{{expert}}"
    stacked = f"{LAYER}.{block}.experts.routed_experts"
    router = Parameter(
        canonical=(f"{LAYER}.{block}.gate.weight",),
        dims=(("experts", "hidden"),),
        megatron=f"{MEGATRON}.mlp.router.weight",
        vllm=f"{LAYER}.{block}.gate.weight",
        place="layer",
    )
    fc1 = replace(
        GATE_UP,
        canonical=(f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
        megatron=f"{local}.linear_fc1.weight",
        vllm=f"{stacked}.w13_weight",
        place="expert",
    )
    fc2 = replace(
        DOWN,
        canonical=(f"{expert}.{down}.weight",),
        megatron=f"{local}.linear_fc2.weight",
        vllm=f"{stacked}.w2_weight",
        place="expert",
    )
    return (POST_NORM, router, fc1, fc2)


def decoder_shape(
    fields: ConfigFields,
    family: str,
    *,
    value_head: bool,
    ffn: str = "intermediate_size",
    head_dim: int | None = None,
    rope_theta: float = 10000.0,
    max_position_embeddings: int = 2048,
    **special: Any,
) -> ModelShape:
    """Takes the fields that all families share, and refuses what is left.

    Args:
        fields: The configuration, less what the family took of it.
        family: The ``model_type``.
        value_head: Whether the files have a value head.
        ffn: The field that is the MLP's width.
        head_dim: Default of ``head_dim``; None for ``hidden_size / num_attention_heads``.
        rope_theta: Default base of the rotary embedding.
        max_position_embeddings: Default.
        **special: Further attributes of the shape.

    Raises:
        ValueError: naming the field that is missing, impossible, or not understood.
    """
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    theta, scaling = fields.rope(rope_theta)
    fields.only("hidden_act", "silu")
    shape = ModelShape(
        family=family,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=fields.size(ffn),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", head_dim or hidden // heads),
        vocab_size=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.size("max_position_embeddings", max_position_embeddings),
        value_head=value_head,
        **special,
    )
    if shape.experts_per_token == 1 and shape.renormalized:
        raise fields.error(
            "num_experts_per_tok = 1 with probabilities that sum to 1 (norm_topk_prob = true, as "
            "mixtral always has it) is not supported: the router would have no gradient"
        )
    fields.finish()
    return shape
