"""The one place that turns a model's shape and a mesh into Megatron's configuration.

Knows the traps of ``TransformerConfig`` (each noted where it is avoided); builds no model
and reads no files. ``build`` uses it.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megappo.models.fp8 import AMAX_HISTORY_LEN, Fp8
from megappo.topology import Topology
from megappo.weights.megatron import check_sequence_parallel
from megappo.weights.shape import ModelShape

Recompute = Literal["full", "selective"]


def transformer_config(
    shape: ModelShape,
    topology: Topology,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute | None,
    fp8: Fp8 | None = None,
) -> TransformerConfig:
    """Megatron's configuration of this model on this mesh; make one per model.

    Args:
        shape: the model.
        topology: the mesh.
        dtype: parameters and activations, float32 or bfloat16.
        sequence_parallel: split activations along the sequence between tensor regions;
            no effect at tensor-parallel size 1.
        recompute: recompute whole layers or the attention core in the backward pass.
        fp8: what TransformerEngine's layers compute in FP8, which has not been run; None where
            there are none of them.

    Raises:
        ValueError: the model's experts need sequence parallelism on this mesh.
    """
    check_sequence_parallel(shape, topology, sequence_parallel)
    return TransformerConfig(
        # Dropout would make the trainer's policy differ from the one that sampled.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=topology.tp,
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
        **_layer_options(shape),
        **_pipeline_options(shape, topology),
        **_expert_options(shape, topology),
        **_recompute_options(recompute),
        **_fp8_options(fp8),
    )


def _layer_options(shape: ModelShape) -> dict[str, Any]:
    """What is the same on every mesh."""
    window = shape.sliding_window
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        # How many tokens are seen to the left and to the right, the token itself not counted.
        "window_size": None if window is None else (window - 1, 0),
    }


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _pipeline_options(shape: ModelShape, topology: Topology) -> dict[str, Any]:
    """Stages and chunks with the very layers that ``Topology.layers`` gives them."""
    layout = [
        ["decoder"] * len(topology.layers(shape.num_layers, stage, chunk))
        for chunk, stage in product(range(topology.vpp), range(topology.pp))
    ]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    options: dict[str, Any] = {
        "pipeline_model_parallel_size": topology.pp,
        "pipeline_model_parallel_layout": layout,
    }
    if topology.vpp > 1:
        # Two stages are each other's next and previous one at once. With the defaults, messages
        # between them are mistaken for each other: gradients are wrong without a word.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        options |= {"virtual_pipeline_model_parallel_size": topology.vpp}
    return options


def _expert_options(shape: ModelShape, topology: Topology) -> dict[str, Any]:
    """Experts as transformers computes them: no loss of their own, no noise, no dropped token."""
    if not shape.num_experts:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": 1,
        "moe_router_dtype": "fp32",
        # The softmax over the chosen experts alone is the one over all, scaled to sum to 1. For a
        # single expert Megatron refuses it, and rightly: the router would have no gradient.
        "moe_router_pre_softmax": not shape.renormalized,
        "moe_router_load_balancing_type": "none",
    }


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


def _fp8_options(fp8: Fp8 | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        # Megatron looks back at one pass; TransformerEngine's own choice is the largest of many.
        "fp8_amax_history_len": AMAX_HISTORY_LEN,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": fp8.layers_at_start + fp8.layers_at_end > 0,
        "num_layers_at_start_in_bf16": fp8.layers_at_start,
        "num_layers_at_end_in_bf16": fp8.layers_at_end,
    }
