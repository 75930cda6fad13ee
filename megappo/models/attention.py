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
        """Keep scale and window; the core has no parameters."""
        super().__init__()
        assert config.context_parallel_size == 1
        self.softmax_scale = softmax_scale
        self._window = None if config.window_size is None else config.window_size[0] + 1

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
        """Attend within each sequence, and within the configuration's window if it has one.

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
        runs = [
            (len(list(run)), length)
            for length, run in groupby((ends[1:] - ends[:-1]).tolist())
            if length > 0
        ]
        if len(runs) == 1:  # splitting and joining would copy, for nothing
            return self._attend(runs[0], query, key, value)
        # Split, not sliced: a slice's backward fills a gradient of all tokens with zeros.
        sizes = [count * length for count, length in runs]
        parts = zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        return torch.cat([self._attend(*part) for part in parts])

    def _attend(
        self, run: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of n sequences of L tokens, run (n, L): [n L, heads * head_dim]."""
        q, k, v = (x.unflatten(0, run).transpose(1, 2) for x in (query, key, value))
        mask = self._mask(run[1], query.device)
        output = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return output.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Which tokens see which, bool [length, length]; None where all before are seen."""
        if self._window is None or length <= self._window:
            return None
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        return mask.tril().triu(1 - self._window)
