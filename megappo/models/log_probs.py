"""Log-probabilities of tokens, and entropies, from logits split over the vocabulary.

The chunked, vocabulary-parallel end of the language model's forward pass. Each rank of a
tensor-parallel group holds the same tokens and its own columns of the logits. Forward and
backward work on a few tokens at a time in float32: no float32 copy of all logits exists at
any time. It knows nothing about Megatron, losses or masks of tokens.

Legend: T tokens, V columns on this rank, C columns of those that are real vocabulary,
c tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Stands for "no column here" and for a masked-out one, where -inf would turn 0 * inf into NaN.
_NO_LOGIT = -1e30


@dataclass(frozen=True)
class _Columns:
    """This rank's share of the vocabulary and how to walk over it."""

    first: int
    count: int
    temperature: float
    chunk_tokens: int

    def chunks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (rows, scaled logits float32 [c, C]); each array is only valid until the next."""
        if not self.count:
            return
        num_tokens = len(logits)
        size = min(self.chunk_tokens, num_tokens)
        buffer = torch.empty(size, self.count, dtype=torch.float32, device=logits.device)
        for start in range(0, num_tokens, self.chunk_tokens):
            rows = slice(start, min(start + self.chunk_tokens, num_tokens))
            scaled = buffer[: rows.stop - start]
            # The padded columns are cut off here; whatever they hold never enters.
            scaled.copy_(logits[rows, : self.count])
            if self.temperature != 1:
                scaled.div_(self.temperature)
            scaled.clamp_(min=_NO_LOGIT)
            yield rows, scaled

    def locate(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's column here, int64 [c, 1], and 1.0 where it is ours, else 0.0: [c]."""
        column = labels - self.first
        ours = (column >= 0) & (column < self.count)
        return column.clamp(0, self.count - 1)[:, None], ours.float()


def _local_sums(
    logits: torch.Tensor, labels: torch.Tensor, columns: _Columns, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum m [T] of this rank's columns, and float32 [2 or 3, T] sums.

    The sums are: the label's logit (0 on other ranks), Σ exp(x - m), Σ exp(x - m) (x - m).
    """
    num_tokens = len(logits)
    maximum = torch.full((num_tokens,), _NO_LOGIT, dtype=torch.float32, device=logits.device)
    sums = torch.zeros(3 if with_entropy else 2, num_tokens, device=logits.device)
    for rows, scaled in columns.chunks(logits):
        column, ours = columns.locate(labels[rows])
        sums[0, rows] = scaled.gather(1, column).squeeze(1) * ours
        maximum[rows] = scaled.amax(dim=-1)
        sums[1:, rows] = _exponential_sums(scaled.sub_(maximum[rows, None]), with_entropy)
    return maximum, sums


def _exponential_sums(shifted: torch.Tensor, with_entropy: bool) -> torch.Tensor:
    """Σ exp(x) and, with entropy, Σ exp(x) x: [1 or 2, c]. Overwrites its input [c, C]."""
    if not with_entropy:
        return shifted.exp_().sum(dim=-1)[None]
    exponential = shifted.exp()
    total = exponential.sum(dim=-1)
    return torch.stack([total, exponential.mul_(shifted).sum(dim=-1)])


def _softmax_gradient(
    log_softmax: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """All of the gradient but the label's own term: [c, C]. Overwrites ``log_softmax``."""
    if grad_entropy is None or entropy is None:
        return log_softmax.exp_().mul_(-grad_log_probs[:, None])
    softmax = log_softmax.exp()
    log_softmax.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_probs[:, None])
    return softmax.mul_(log_softmax)


def _reduce_sums(
    maximum: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum and sums over all ranks of the group, in two collectives."""
    highest = maximum.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = maximum - highest
    if len(sums) == 3:
        sums[2] += sums[1] * shift
    sums[1:] *= shift.exp()
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    return highest, sums


class _LogProbsAndEntropy(torch.autograd.Function):
    """Forward and backward over chunks; saves the logits as they are, and [T] vectors."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        columns: _Columns,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        maximum, sums = _local_sums(logits, labels, columns, with_entropy)
        if group is not None:
            maximum, sums = _reduce_sums(maximum, sums, group)
        log_sum = sums[1].log()
        log_probs = sums[0] - maximum - log_sum
        entropy = log_sum - sums[2] / sums[1] if with_entropy else None
        ctx.columns = columns
        ctx.save_for_backward(logits, labels, maximum, log_sum, entropy)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        # With p the softmax: d log p_label / dx_j = [j = label] - p_j and
        # dH / dx_j = -p_j (log p_j + H), each divided by the temperature.
        logits, labels, maximum, log_sum, entropy = ctx.saved_tensors
        columns: _Columns = ctx.columns
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(maximum)
        vectors = (grad_entropy, entropy)
        gradient = torch.empty_like(logits)
        gradient[:, columns.count :] = 0
        for rows, log_softmax in columns.chunks(logits):
            log_softmax.sub_(maximum[rows, None]).sub_(log_sum[rows, None])
            parts = [None if vector is None else vector[rows] for vector in vectors]
            chunk = _softmax_gradient(log_softmax, grad_log_probs[rows], *parts)
            column, ours = columns.locate(labels[rows])
            chunk.scatter_add_(1, column, (grad_log_probs[rows] * ours)[:, None])
            gradient[rows, : columns.count] = chunk.div_(columns.temperature)
            del chunk  # before the next one is made
        return gradient, None, None, None, None


def log_probs_and_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    tp_rank: int,
    chunk_tokens: int = 1024,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each label, and entropy of each distribution, at a temperature.

    All ranks of ``tp_group`` call it together and get the same result. The gradient is that of
    this rank's columns, in the logits' type, 0 on padded columns.

    Args:
        logits: float [T, V], this rank's columns; rank r holds columns r V to (r + 1) V - 1.
            They must not change between forward and backward. -inf masks a column out: it has
            no probability, no entropy and no gradient.
        labels: int64 [T], each at least 0 and below ``vocab_size``.
        temperature: Above 0; divides the logits in float32.
        vocab_size: True size of the vocabulary; columns from it on are padding, and ignored.
        tp_group: The tensor-parallel group; None if this rank holds all columns.
        tp_rank: This rank's place in the group.
        chunk_tokens: Tokens converted to float32 at a time; the result does not depend on it.
        with_entropy: Whether entropies are computed.

    Returns:
        Log-probabilities float32 [T], and entropies float32 [T] or None.
    """
    assert temperature > 0 and chunk_tokens > 0
    first = tp_rank * logits.shape[1]
    count = min(max(vocab_size - first, 0), logits.shape[1])
    columns = _Columns(first, count, temperature, chunk_tokens)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _LogProbsAndEntropy.apply
    return apply(logits, labels, columns, tp_group, with_entropy)
