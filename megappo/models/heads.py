"""The scalar head that turns a decoder into a value model.

Takes the place of the output layer on the last pipeline stage. Computes in float32, replicated
over tensor ranks; correct under sequence parallelism.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import nn

from megappo.device.platform import device


class ValueHead(nn.Module):
    """One float per token: ``hidden @ weight.T`` in float32.

    The weight is named and shaped as a one-label classifier's ``score`` and starts as small
    seeded noise, drawn without regard to the mesh, so that every layout starts alike. It has the
    type of the model's other parameters: Megatron's optimizers save a wrong state for a
    parameter group of mixed types.

    Args:
        config: of the model.
        seed: of the initial weight.
    """

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        """Draw the initial weight."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, config.hidden_size, generator=generator)
        self.weight = nn.Parameter(
            (noise / (config.hidden_size + 1)).to(device(), config.params_dtype)
        )
        # Each tensor rank sees its part of the sequence: Megatron sums these gradients.
        vars(self.weight).update(sequence_parallel=config.sequence_parallel)
        self._gathers = config.sequence_parallel
        self._group = parallel_state.get_tensor_model_parallel_group()

    def forward(
        self,
        hidden: torch.Tensor,
        weight: None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Values of the whole sequence, on every tensor rank.

        Args:
            hidden: [T, 1, hidden_size], or this rank's T / tp rows under sequence parallelism.
            weight: None; there is no tied head.
            runtime_gather_output: ignored; part of the output layer's interface.

        Returns:
            float32 [T, 1, 1] and no bias.
        """
        values = hidden.float() @ self.weight.float().t()
        if self._gathers:
            # Every tensor rank computes the same loss, so its gradient is only cut, not summed.
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._group
            )
        return values, None
