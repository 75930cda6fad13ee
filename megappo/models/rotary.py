"""Rotary embeddings with the exact frequencies of the Hugging Face configuration.

Replaces Megatron's ``RotaryEmbedding`` for two reasons: that one exposes only the *factor* of
llama3 scaling, and its ``lru_cache`` on ``forward`` keeps every model that ever ran alive.
"""

from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn

from megappo.weights.shape import ModelShape


def _llama3(
    inv_freq: torch.Tensor, factor: float, low: float, high: float, original_length: float
) -> torch.Tensor:
    """Divide long wavelengths by ``factor``, keep short ones, blend between."""
    wavelength = 2 * math.pi / inv_freq
    blend = ((original_length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Angle per position of each pair of head dimensions.

    Returns:
        float32 [head_dim / 2], on the CPU.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    inv_freq: torch.Tensor = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return inv_freq
    if scaling["rope_type"] == "linear":
        return inv_freq / float(scaling["factor"])
    if scaling["rope_type"] == "llama3":
        return _llama3(
            inv_freq,
            scaling["factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )
    raise ValueError(
        f"rope_scaling of type {scaling['rope_type']!r} is not supported: only linear and llama3"
    )


class PackedRotary(nn.Module):
    """Angles for positions 0 to max_seq_len - 1; Megatron restarts them at every sequence.

    Args:
        inv_freq: float32 [head_dim / 2].
        device: where the angles are kept.
    """

    get_rotary_seq_len = RotaryEmbedding.get_rotary_seq_len

    def __init__(self, inv_freq: torch.Tensor, device: torch.device) -> None:
        """Keep the frequencies; angles are made when first asked for."""
        super().__init__()
        self._inv_freq = inv_freq.to(device)
        self._angles = torch.empty(0, 1, 1, 2 * len(inv_freq), device=device)

    def forward(
        self, max_seq_len: int, packed_seq: bool = True, cp_group: None = None
    ) -> torch.Tensor:
        """Exactly ``max_seq_len`` rows: from the row count Megatron guesses how to read them.

        Returns:
            float32 [max_seq_len, 1, 1, head_dim].
        """
        assert packed_seq and cp_group is None
        if max_seq_len > len(self._angles):
            length = 1 << (max_seq_len - 1).bit_length()
            positions = torch.arange(length, dtype=torch.float32, device=self._inv_freq.device)
            half = torch.outer(positions, self._inv_freq)
            self._angles = torch.cat((half, half), dim=-1)[:, None, None, :]
        return self._angles[:max_seq_len]
