"""RMSNorm on plain torch, aware of sequence parallelism.

Megatron's local layers have none: torch's wrapper refuses sequence parallelism, apex has no
RMSNorm. Computes in float32 and scales in the model's type, as transformers does.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import nn

from megappo.device.platform import device


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        config: of the model; its ``sequence_parallel`` marks the weight, so that gradients of
            the sequence parts are summed over tensor ranks.
        hidden_size: length of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        """Make the weight, all ones."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device())
        )
        vars(self.weight).update(sequence_parallel=config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` [..., hidden_size]; keeps its type."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)
