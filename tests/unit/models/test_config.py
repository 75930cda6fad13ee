"""From shape and mesh to Megatron's configuration: what is refused and what is forced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.models.config import Recompute, transformer_config
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
