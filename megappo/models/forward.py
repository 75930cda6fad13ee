"""Runs a model on one packed micro-batch, and aligns what comes out with the tokens.

A decoder's output at position ``t`` speaks of token ``t + 1``. Records are aligned with
tokens (``records``): ``next_tokens`` gives the labels of the outputs, ``align_with_tokens``
moves the results one place to the right.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import nn

from megappo.models.heads import ValueHead
from megappo.records import PackedBatch


def packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    """Megatron's description of the sequences. Lengths are Python ints: RoPE needs them so."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def position_ids(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Position of each token in its sequence, int64 [T]."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    return torch.arange(len(starts), device=starts.device) - starts


def forward_packed(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """One forward pass of this stage's chunk, wrapped in DDP or not.

    Under sequence parallelism T is a multiple of the tensor-parallel size.

    Returns:
        On the last stage, output ``t`` follows token ``t``: logits [T, V / tp] in the model's
        type, or values float32 [T]. On other stages the activations for the next one.
    """
    output: torch.Tensor = model(
        batch.tokens[None],
        position_ids(batch.cu_seqlens)[None],
        None,
        packed_seq_params=packed_seq_params(batch),
    )
    chunk = unwrap_model(model)
    if not chunk.post_process:
        return output
    output = output[0]
    return output[:, 0] if isinstance(chunk.output_layer, ValueHead) else output


def next_tokens(batch: PackedBatch) -> torch.Tensor:
    """Labels of the outputs, int64 [T]: the token after each one, 0 at the end of a sequence."""
    labels = torch.cat((batch.tokens[1:], batch.tokens[:1]))
    return labels.index_fill(0, _nonempty(batch.cu_seqlens)[1] - 1, 0)


def align_with_tokens(outputs: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Move per-output results to the token they speak of.

    Args:
        outputs: [T], entry ``t`` computed from the tokens of its sequence up to ``t``.
        cu_seqlens: int32 [S + 1].

    Returns:
        [T], entry ``t`` computed from the tokens before ``t``; 0 for the first of a sequence.
    """
    moved = torch.cat((outputs[-1:], outputs[:-1]))
    return moved.index_fill(0, _nonempty(cu_seqlens)[0], 0)


def _nonempty(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First position and end of every sequence that has tokens, int64."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    keep = ends > starts
    return starts[keep], ends[keep]
