"""From shape and mesh to Megatron's configuration: what is refused and what is forced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.enums import LayerType

from megappo.models.config import Recompute, transformer_config
from megappo.models.fp8 import Fp8
from megappo.topology import Topology
from megappo.weights.shape import ModelShape
from tests.unit.models.test_rotary import SHAPE


def config(shape: ModelShape = SHAPE, tp: int = 1, pp: int = 1, **options: Any) -> Any:
    """The configuration under default options."""
    defaults: dict[str, Any] = {
        "dtype": torch.float32,
        "sequence_parallel": False,
        "recompute": None,
    }
    return transformer_config(shape, Topology(tp * pp, tp, pp), **{**defaults, **options})


def test_dropout_is_zero() -> None:
    """Nothing random sits between the policy that samples and the one that trains (C30)."""
    for options in ({}, {"recompute": "full"}, {"dtype": torch.bfloat16}):
        made = config(**options)
        assert made.hidden_dropout == 0 and made.attention_dropout == 0


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (None, (None, None, None)),
        ("full", ("full", "uniform", 1)),
        ("selective", ("selective", None, None)),
    ],
)
def test_recompute(recompute: Recompute | None, expected: tuple[Any, ...]) -> None:
    """Recomputation is layer by layer, or the attention core."""
    made = config(recompute=recompute)
    found = (made.recompute_granularity, made.recompute_method, made.recompute_num_layers)
    assert found == expected


def test_types_and_shape_are_carried() -> None:
    """Every number of the shape arrives; sequence parallelism is off at one tensor rank."""
    shape = replace(SHAPE, norm_eps=1e-3, head_dim=32)
    made = config(shape, tp=2, pp=2, dtype=torch.bfloat16, sequence_parallel=True)
    assert made.bf16 and made.params_dtype == made.pipeline_dtype == torch.bfloat16
    assert made.sequence_parallel and made.layernorm_epsilon == 1e-3
    assert (made.kv_channels, made.num_query_groups, made.ffn_hidden_size) == (32, 2, 96)
    assert not config(sequence_parallel=True).sequence_parallel


LAYERS_OF_STAGES = [
    (Topology(1), [[5]]),
    (Topology(2, pp=2), [[3], [2]]),
    (Topology(4, pp=4), [[2], [1], [1], [1]]),
    (Topology(2, pp=2, vpp=2), [[2, 1], [1, 1]]),
]


@pytest.mark.parametrize(("topology", "expected"), LAYERS_OF_STAGES, ids=str)
def test_stages_hold_the_layers_of_the_topology(
    topology: Topology, expected: list[list[int]]
) -> None:
    """Counts and offsets by Megatron's own arithmetic, for layers that do not divide."""
    made = transformer_config(
        replace(SHAPE, num_layers=5),
        topology,
        dtype=torch.float32,
        sequence_parallel=False,
        recompute=None,
    )
    layout = made.pipeline_model_parallel_layout
    found = [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    assert found == expected
    assert layout.layout[0][0][0] == LayerType.embedding
    assert layout.layout[-1][-1][-1] == LayerType.loss
    assert made.batch_p2p_comm == (topology.vpp == 1) and made.overlap_p2p_comm != (
        topology.vpp == 1
    )


def test_a_window_counts_the_token_itself() -> None:
    """Megatron's window is what is seen to the left and right, beside the token."""
    assert config(replace(SHAPE, sliding_window=8)).window_size == (7, 0)
    assert config().window_size is None


def test_experts_are_computed_as_transformers_does() -> None:
    """In fp32, without losses or noise; scaled probabilities are a softmax over the chosen."""
    for renormalized in (True, False):
        shape = replace(SHAPE, num_experts=4, experts_per_token=2, renormalized=renormalized)
        made = config(shape, tp=2, sequence_parallel=True)
        assert made.moe_router_pre_softmax != renormalized
        assert made.moe_router_dtype == "fp32" and made.moe_ffn_hidden_size == 96
        assert made.moe_router_load_balancing_type == "none" and made.moe_aux_loss_coeff == 0
        assert made.moe_input_jitter_eps is None and made.moe_expert_capacity_factor is None
        assert (made.expert_tensor_parallel_size, made.expert_model_parallel_size) == (1, 1)


def test_fp8_is_megatrons_by_its_own_names() -> None:
    """What TransformerEngine's layers are told; Megatron's own checks take the names."""
    assert config().fp8 is None
    fp8 = Fp8("hybrid", "blockwise", layers_at_start=1, layers_at_end=0)
    made = config(replace(SHAPE, num_layers=4), pp=2, fp8=fp8)
    assert (made.fp8, made.fp8_recipe) == ("hybrid", Fp8Recipe.blockwise)
    assert made.first_last_layers_bf16
    left_alone = [layer for layer in range(4) if is_first_last_bf16_layer(made, layer)]
    assert left_alone == [layer for layer in range(4) if not fp8.covers(layer, 4)] == [0]
    delayed = config(fp8=Fp8("e4m3", "delayed"))
    assert (delayed.fp8, delayed.fp8_recipe) == ("e4m3", Fp8Recipe.delayed)
    assert (delayed.fp8_amax_history_len, delayed.fp8_amax_compute_algo) == (16, "max")
    assert not delayed.first_last_layers_bf16
