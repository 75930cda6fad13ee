"""Which class does what inside a Megatron layer: plain torch, or TransformerEngine on CUDA.

Both give parameters the same names, so that one layout of weights serves them: the
TransformerEngine spec leaves the norms unfused. It has not been run: it needs a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megappo.device.platform import is_cuda
from megappo.models.attention import PackedAttention
from megappo.models.norms import RMSNorm

# Checkpoint keys are TransformerEngine's, so that either spec loads the other's checkpoint.
_CHECKPOINT_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def _block(
    config: TransformerConfig, *, column: Any, row: Any, core_attention: Any, norm: Any
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers, made of the given classes."""
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
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_CHECKPOINT_KEYS,
        ),
    )
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def local_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Layers of plain torch; they run on CPU and on CUDA."""
    return _block(
        config,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        core_attention=PackedAttention,
        norm=RMSNorm,
    )


def transformer_engine_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Layers of TransformerEngine, with its packed attention kernel. CUDA only."""
    from megatron.core.extensions import transformer_engine as te

    return _block(
        config,
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        core_attention=te.TEDotProductAttention,
        norm=te.TENorm,
    )


def layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """TransformerEngine's layers where there is CUDA and the package, else plain torch."""
    if is_cuda() and importlib.util.find_spec("transformer_engine") is not None:
        return transformer_engine_spec(config)
    return local_spec(config)
