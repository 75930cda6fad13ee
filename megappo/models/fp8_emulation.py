"""FP8 linear layers without FP8 hardware: operands are rounded to FP8 and back, then multiplied.

What this is for: the same configuration keys, weights, reshards and PPO steps run on a CPU (or
on a GPU without TransformerEngine) with FP8's rounding in them. It claims nothing about
TransformerEngine's bits, only the same kind of error:

- Activations and weights are rounded to E4M3 for the forward pass, gradients of outputs to E5M2
  ("hybrid") or E4M3 for the backward pass, and both products of the backward pass use these very
  operands. TransformerEngine rounds some of them again, along the other dimension.
- Products and sums are those of the model's type. In bf16 a rounded operand is rounded again.
- Scales come from what the rank holds: its shard of a weight or activation, its replica's tokens.
  Only the input that sequence parallelism cuts along the tokens has one amax over tensor ranks.

Scales bring the largest magnitude of a tensor (tensorwise), the largest that the last training
passes saw (delayed), or that of a block (blockwise: 128 x 128 of a weight, 128 features of a
token, powers of two) to the largest FP8 number. Delayed scaling moves on in passes with
gradients only; before its first one it uses the tensor at hand. Its history is no parameter
and no part of a checkpoint: it starts empty after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megappo.models.fp8 import AMAX_HISTORY_LEN, Fp8

BLOCK = 128
"""Columns of a block, and rows of a weight's."""
INPUT, WEIGHT, GRADIENT = range(3)
"""The operands of a linear layer."""

Change = Callable[[torch.Tensor], torch.Tensor]


def emulate_fp8(model: GPTModel, fp8: Fp8) -> None:
    """Make a model chunk's linear layers compute in emulated FP8, in the layers that it covers.

    Embedding, norms, router, heads and the attention itself stay as they are; so do all
    parameters and their names.
    """
    for layer in model.decoder.layers:
        if not fp8.covers(layer.layer_number - 1, model.config.num_layers):
            continue
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                # Megatron's one call between communication and arithmetic of a linear layer.
                multiply = Fp8Multiply(module._forward_impl, fp8, module.weight.device)
                vars(module).update(_forward_impl=multiply)


class Fp8Multiply:
    """Stands in for ``_forward_impl`` of one of Megatron's linear layers.

    Args:
        multiply: Megatron's own, which does the arithmetic and gathers what is cut.
        fp8: what is asked for.
        device: the layer's.

    Attributes:
        amax_history: float32 [3, AMAX_HISTORY_LEN], by operand, the newest first; 0 for none.
    """

    def __init__(
        self, multiply: Callable[..., torch.Tensor], fp8: Fp8, device: torch.device
    ) -> None:
        self._multiply = multiply
        self._recipe = fp8.recipe
        gradients = torch.float8_e5m2 if fp8.format == "hybrid" else torch.float8_e4m3fn
        self._types = (torch.float8_e4m3fn, torch.float8_e4m3fn, gradients)
        self.amax_history = torch.zeros(3, AMAX_HISTORY_LEN, device=device)

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        """``input`` [..., in] times ``weight`` [out, in], as Megatron's function of the options."""
        learns = torch.is_grad_enabled() and weight.requires_grad
        group = options["tp_group"] if options["sequence_parallel"] else None
        through: Callable[..., torch.Tensor] = _Through.apply
        rounded = [
            through(tensor, partial(self._rounded, operand, learns, over), _unchanged)
            for tensor, operand, over in ((input, INPUT, group), (weight, WEIGHT, None))
        ]
        output = self._multiply(input=rounded[0], weight=rounded[1], **options)
        return through(output, _unchanged, partial(self._rounded, GRADIENT, learns, None))

    def _rounded(
        self, operand: int, learns: bool, group: dist.ProcessGroup | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        """The tensor rounded to the operand's FP8 type, in its own type."""
        fp8_type = self._types[operand]
        if self._recipe == "blockwise":
            rows = BLOCK if operand == WEIGHT else 1
            return round_to_fp8(tensor, fp8_type, block_scales(tensor, fp8_type, rows))
        amax = tensor.abs().amax().float() if tensor.numel() else self.amax_history.new_zeros(())
        if group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        if self._recipe == "delayed":
            amax = self._delayed(amax, operand, learns)
        return round_to_fp8(tensor, fp8_type, scale_of(amax, fp8_type))

    def _delayed(self, amax: torch.Tensor, operand: int, learns: bool) -> torch.Tensor:
        """The largest amax of the history, which then takes this one if the pass trains."""
        history = self.amax_history[operand]
        seen = history.max()
        if learns:
            history.copy_(torch.cat([amax[None], history[:-1]]))
        return torch.where(seen > 0, seen, amax)


class _Through(torch.autograd.Function):
    """One change to a tensor on the way to the output, another to its gradient on the way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, forwards: Change, backwards: Change
    ) -> torch.Tensor:
        ctx.backwards = backwards
        return forwards(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backwards(gradient), None, None


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def scale_of(amax: torch.Tensor, fp8_type: torch.dtype) -> torch.Tensor:
    """The factor that brings magnitudes ``amax``, float32, to the largest number of the type."""
    scale = torch.full_like(amax, torch.finfo(fp8_type).max) / amax
    return torch.where(amax > 0, scale, 1.0).clamp(max=torch.finfo(torch.float32).max)


def block_scales(tensor: torch.Tensor, fp8_type: torch.dtype, rows: int) -> torch.Tensor:
    """Scales of blocks of ``rows`` x 128, spread over their elements; each is a power of two.

    Args:
        tensor: [..., columns], taken as a matrix; blocks at its far edges may be smaller.
        fp8_type: the type that is rounded to.
        rows: of a block.

    Returns:
        float32, shaped as ``tensor``.
    """
    matrix = tensor.detach().float().reshape(-1, tensor.shape[-1]).abs()
    height, width = matrix.shape
    padded = functional.pad(matrix, (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    _, exponent = torch.frexp(scale_of(blocks.amax(dim=(1, 3)), fp8_type))
    scales = torch.ldexp(torch.ones(exponent.shape, device=tensor.device), exponent - 1)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)
    return spread[:height, :width].reshape(tensor.shape)


def round_to_fp8(tensor: torch.Tensor, fp8_type: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """The nearest FP8 numbers to ``tensor`` x ``scale``, divided by ``scale``.

    What is too large becomes the largest number; what is not finite stays so, to be seen.
    """
    exact = tensor.detach().float()
    largest = torch.finfo(fp8_type).max
    rounded = (exact * scale).clamp(-largest, largest).to(fp8_type).float() / scale
    return torch.where(exact.isfinite(), rounded, exact).to(tensor.dtype)
