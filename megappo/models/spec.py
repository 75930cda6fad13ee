"""Which class does what inside a Megatron layer: plain torch, or TransformerEngine on CUDA.

Both give parameters the same names, so that one layout of weights serves them: the
TransformerEngine spec leaves the norms unfused. It has not been run: it needs a GPU. FP8 needs no
other spec: TransformerEngine's layers follow the configuration, plain ones are changed
afterwards (``fp8_emulation``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megappo.device.platform import Implementation
from megappo.models.attention import PackedAttention
from megappo.models.norms import RMSNorm

# Checkpoint keys are TransformerEngine's, so that either spec loads the other's checkpoint. It
# fuses a norm with the linear layer behind it; there is none before experts.
_INPUT_NORM_KEY = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM_KEY = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _block(
    config: TransformerConfig,
    chunk: int | None,
    *,
    column: Any,
    row: Any,
    core_attention: Any,
    norm: Any,
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage's chunk, made of the given classes."""
    head_norm = norm if config.qk_layernorm else IdentityOp
    dense = config.num_moe_experts is None
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=core_attention,
                    linear_proj=row,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_mlp(dense, MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_INPUT_NORM_KEY | (_MLP_NORM_KEY if dense else {}),
        ),
    )
    layers = [layer] * get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _mlp(dense: bool, linears: MLPSubmodules) -> ModuleSpec:
    """One gated MLP, or a router and an MLP per expert, run one after the other."""
    if dense:
        return ModuleSpec(module=MLP, submodules=linears)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))


def local_spec(config: TransformerConfig, chunk: int | None = None) -> TransformerBlockSubmodules:
    """Layers of plain torch; they run on CPU and on CUDA."""
    return _block(
        config,
        chunk,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        core_attention=PackedAttention,
        norm=RMSNorm,
    )


def transformer_engine_spec(
    config: TransformerConfig, chunk: int | None = None
) -> TransformerBlockSubmodules:
    """Layers of TransformerEngine, with its packed attention kernel. CUDA only."""
    from megatron.core.extensions import transformer_engine as te

    return _block(
        config,
        chunk,
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        core_attention=te.TEDotProductAttention,
        norm=te.TENorm,
    )


LAYER_SPECS: dict[Implementation, Callable[..., TransformerBlockSubmodules]] = {
    "local": local_spec,
    "transformer_engine": transformer_engine_spec,
}
