"""Lays out the samples that a reward model scores, and reads the scores off its output.

Sequences of this replica end to end in micro-batches, longest first, so that those of a
micro-batch are about alike. Knows no tokenizer and no role.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megappo.records import PackedBatch


def score_batches(
    sequences: Sequence[Sequence[int]], *, token_budget: int, multiple: int, device: torch.device
) -> list[PackedBatch]:
    """Micro-batches of at most ``token_budget`` tokens, or of one longer sequence.

    Args:
        sequences: token ids of each sample.
        token_budget: most tokens, the dummies that round up not counted.
        multiple: the length of every micro-batch is rounded up to a multiple of this.
        device: where they live.
    """
    batches: list[list[int]] = []
    filled = 0
    for row in sorted(range(len(sequences)), key=lambda row: -len(sequences[row])):
        if not batches or filled + len(sequences[row]) > token_budget:
            batches.append([])
            filled = 0
        batches[-1].append(row)
        filled += len(sequences[row])
    return [_packed(sequences, rows, multiple, device) for rows in batches]


def dummy_batch(multiple: int, device: torch.device) -> PackedBatch:
    """A micro-batch without samples, for a replica that has fewer than others."""
    return _packed([], [], multiple, device)


def last_tokens(output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """What the model says at the last token of every real sample, [S']."""
    return output[batch.cu_seqlens[1 : 1 + len(batch.samples)].long() - 1]


def _packed(
    sequences: Sequence[Sequence[int]], rows: Sequence[int], multiple: int, device: torch.device
) -> PackedBatch:
    tokens = [token for row in rows for token in sequences[row]]
    total = max(-(-len(tokens) // multiple), 1) * multiple
    lengths = [len(sequences[row]) for row in rows]
    if total > len(tokens):
        lengths.append(total - len(tokens))
        tokens += [0] * (total - len(tokens))
    ends = torch.tensor(lengths).cumsum(0)
    return PackedBatch(
        tokens=torch.tensor(tokens, device=device),
        cu_seqlens=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(device, torch.int32),
        action_mask=torch.zeros(total, dtype=torch.bool, device=device),
        engine_log_probs=torch.zeros(total, device=device),
        samples=torch.tensor(rows, dtype=torch.int64, device=device),
    )
