"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else is ``model_type: llama``.

Its table of parameters and the translation of its configuration; everything else about
Llama weights follows from these two.
"""

from __future__ import annotations

from typing import Any

from megappo.weights.families.config_fields import ConfigFields
from megappo.weights.families.table import Family, Parameter
from megappo.weights.shape import ModelShape

ATTENTION = "model.layers.{layer}.self_attn"
MLP = "model.layers.{layer}.mlp"
MEGATRON = "decoder.layers.{layer}"

TABLE = (
    Parameter(
        canonical=("model.embed_tokens.weight",),
        dims=(("vocab", "hidden"),),
        megatron="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
        place="embedding",
        split=0,
    ),
    Parameter(
        canonical=("model.layers.{layer}.input_layernorm.weight",),
        dims=(("hidden",),),
        megatron=f"{MEGATRON}.input_layernorm.weight",
        vllm="model.layers.{layer}.input_layernorm.weight",
        place="layer",
    ),
    Parameter(
        canonical=tuple(f"{ATTENTION}.{x}_proj.weight" for x in "qkv"),
        dims=(("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
        megatron=f"{MEGATRON}.self_attention.linear_qkv.weight",
        vllm=f"{ATTENTION}.qkv_proj.weight",
        place="layer",
        fusion="qkv",
        split=0,
    ),
    Parameter(
        canonical=(f"{ATTENTION}.o_proj.weight",),
        dims=(("hidden", "q"),),
        megatron=f"{MEGATRON}.self_attention.linear_proj.weight",
        vllm=f"{ATTENTION}.o_proj.weight",
        place="layer",
        split=1,
    ),
    Parameter(
        canonical=("model.layers.{layer}.post_attention_layernorm.weight",),
        dims=(("hidden",),),
        megatron=f"{MEGATRON}.pre_mlp_layernorm.weight",
        vllm="model.layers.{layer}.post_attention_layernorm.weight",
        place="layer",
    ),
    Parameter(
        canonical=(f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"),
        dims=(("ffn", "hidden"), ("ffn", "hidden")),
        megatron=f"{MEGATRON}.mlp.linear_fc1.weight",
        vllm=f"{MLP}.gate_up_proj.weight",
        place="layer",
        fusion="gate_up",
        split=0,
    ),
    Parameter(
        canonical=(f"{MLP}.down_proj.weight",),
        dims=(("hidden", "ffn"),),
        megatron=f"{MEGATRON}.mlp.linear_fc2.weight",
        vllm=f"{MLP}.down_proj.weight",
        place="layer",
        split=1,
    ),
    Parameter(
        canonical=("model.norm.weight",),
        dims=(("hidden",),),
        megatron="decoder.final_layernorm.weight",
        vllm="model.norm.weight",
        place="final",
    ),
    Parameter(
        canonical=("lm_head.weight",),
        dims=(("vocab", "hidden"),),
        megatron="output_layer.weight",
        vllm="lm_head.weight",
        place="lm_head",
        split=0,
    ),
    Parameter(
        canonical=("score.weight",),
        dims=(("one", "hidden"),),
        megatron="output_layer.weight",
        vllm=None,
        place="value_head",
    ),
)


def translate(config: dict[str, Any], value_head: bool, where: str) -> ModelShape:
    """Makes the shape from a parsed ``config.json``.

    Raises:
        ValueError: naming the field that is missing, impossible, or not understood.
    """
    fields = ConfigFields(config, where)
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    theta, scaling = fields.rope(default_theta=10000.0)
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("pretraining_tp", 1)
    fields.only("rope_interleaved", False)
    shape = ModelShape(
        family="llama",
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", hidden // heads),
        vocab_size=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        value_head=value_head,
    )
    fields.finish()
    return shape


FAMILY = Family(
    table=TABLE, translate=translate, value_architecture="LlamaForSequenceClassification"
)
