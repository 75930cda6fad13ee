"""From shape and mesh to Megatron's configuration: what is refused and what is forced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.models.build import padded_vocab
from megappo.models.config import Recompute, check_divisible, transformer_config
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


@pytest.mark.parametrize(
    ("changes", "tp", "pp", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, 1, ["= 4 ", "num_attention_heads = 6"]),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, 1, ["= 2 ", "num_attention_heads = 9"]),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, 1, ["= 2 ", "num_key_value_heads = 3"]),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, 1, ["= 4 ", "num_key_value_heads = 6"]),
        ({"ffn_hidden_size": 97}, 2, 1, ["= 2 ", "intermediate_size = 97"]),
        ({"num_layers": 3}, 1, 2, ["pipeline_model_parallel_size = 2", "num_hidden_layers = 3"]),
        ({"num_layers": 30}, 1, 4, ["pipeline_model_parallel_size = 4", "= 30"]),
    ],
)
def test_uneven_cuts_are_refused(
    changes: dict[str, Any], tp: int, pp: int, words: list[str]
) -> None:
    """One line with both numbers, before anything is built."""
    with pytest.raises(ValueError) as error:
        check_divisible(replace(SHAPE, **changes), Topology(tp * pp, tp, pp))
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "megatron." in message


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_key_value_heads_may_be_fewer_than_ranks(kv_heads: int, tp: int) -> None:
    """Ranks share a key-value head when there are more of them."""
    check_divisible(replace(SHAPE, num_kv_heads=kv_heads), Topology(tp, tp))


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


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(101, 1, 104), (101, 2, 112), (112, 2, 112), (49152, 3, 49152)]
)
def test_vocabulary_padding(vocab: int, tp: int, rows: int) -> None:
    """Rows are a multiple of 8 on every tensor rank."""
    assert padded_vocab(vocab, tp) == rows
