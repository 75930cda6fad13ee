"""Causal attention over packed sequences on plain torch: the core of the local layers.

Megatron's local ``DotProductAttention`` refuses packed input. Here every sequence attends to
itself alone, so no token sees another sequence, whatever shares its micro-batch. With
TransformerEngine its own kernel does this (``spec``).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn import functional


class PackedAttention(nn.Module):
    """Scaled dot-product attention of one layer's local heads.

    Args:
        config: of the model.
        layer_number: unused; Megatron passes it.
        softmax_scale: None for 1 / sqrt(head_dim).
        **unused: what else Megatron passes to an attention core.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        """Keep the scale; the core has no parameters."""
        super().__init__()
        assert config.context_parallel_size == 1
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Neighbours of equal length go through the kernel together.

        Args:
            query: [T, heads, head_dim], T tokens end to end.
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, head_dim].
            attention_mask: None; the boundaries are in ``packed_seq_params``.
            packed_seq_params: with ``cu_seqlens_q`` int32 [S + 1].
            **unused: what else Megatron passes.

        Returns:
            [T, heads * head_dim].
        """
        assert attention_mask is None
        ends = packed_seq_params.cu_seqlens_q
        outputs: list[torch.Tensor] = []
        start = 0
        for length, run in groupby((ends[1:] - ends[:-1]).tolist()):
            count = len(list(run))
            if length == 0:
                continue
            stop = start + count * length
            q, k, v = (
                x[start:stop].unflatten(0, (count, length)).transpose(1, 2)
                for x in (query, key, value)
            )
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            start = stop
        return torch.cat(outputs).flatten(1)
