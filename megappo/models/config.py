"""The one place that turns a model's shape and a mesh into Megatron's configuration.

Knows the traps of ``TransformerConfig`` (each noted where it is avoided); builds no model
and reads no files. ``build`` uses it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megappo.topology import Topology
from megappo.weights.shape import ModelShape

Recompute = Literal["full", "selective"]


def transformer_config(
    shape: ModelShape,
    topology: Topology,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute | None,
) -> TransformerConfig:
    """Megatron's configuration of this model on this mesh; make one per model.

    Args:
        shape: the model.
        topology: the mesh.
        dtype: parameters and activations, float32 or bfloat16.
        sequence_parallel: split activations along the sequence between tensor regions;
            no effect at tensor-parallel size 1.
        recompute: recompute whole layers or the attention core in the backward pass.
    """
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        # Dropout would make the trainer's policy differ from the one that sampled.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        sequence_parallel=sequence_parallel and topology.tp > 1,
        # Every weight is imported, so none is drawn. Not by perform_initialization=False: that
        # also leaves out the marks by which gradient norms tell shards from replicas.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        # The loss function returns a sum and a token count: exact for any micro-batch cut.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length; demands "alltoall", also for dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Fusions that need apex or torch.compile.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        # The default, "full", is deprecated and warns; no CUDA graph is captured either way.
        cuda_graph_scope=[],
        **_recompute_options(recompute),
    )


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _recompute_options(recompute: Recompute | None) -> dict[str, Any]:
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}
