"""What ``build_model`` refuses before Megatron sees it; the rest is in distributed/test_parity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.models.build import build_model
from megappo.topology import Topology
from tests.unit.models.test_rotary import SHAPE


@pytest.mark.parametrize(
    ("changes", "tp", "pp", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, 1, ["= 4 ", "num_attention_heads = 6"]),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, 1, ["= 2 ", "num_attention_heads = 9"]),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, 1, ["= 2 ", "num_key_value_heads = 3"]),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, 1, ["= 4 ", "num_key_value_heads = 6"]),
        ({"ffn_hidden_size": 97}, 2, 1, ["= 2 ", "intermediate_size = 97"]),
        ({"num_layers": 3}, 1, 4, ["pipeline_model_parallel_size", "4 x 1", "= 3"]),
        ({"num_experts": 4, "experts_per_token": 2}, 2, 1, ["megatron.sequence_parallel", "= 2 "]),
    ],
)
def test_uneven_cuts_are_refused(
    changes: dict[str, Any], tp: int, pp: int, words: list[str]
) -> None:
    """C8: one line with both numbers and the key, before anything is built."""
    with pytest.raises(ValueError) as error:
        build_model(
            replace(SHAPE, **changes),
            Topology(tp * pp, tp, pp),
            head="lm",
            dtype=torch.float32,
            sequence_parallel=False,
            recompute=None,
        )
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "megatron." in message
