"""Labels, alignment and positions of packed sequences, on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from megappo.models.forward import (
    align_with_tokens,
    next_tokens,
    packed_seq_params,
    position_ids,
)
from megappo.records import PackedBatch


def batch(*sequences: list[int]) -> PackedBatch:
    """Sequences of token ids end to end."""
    lengths = [len(s) for s in sequences]
    tokens = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
    return PackedBatch(
        tokens=tokens,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        action_mask=torch.zeros(len(tokens), dtype=torch.bool),
        engine_log_probs=torch.zeros(len(tokens)),
        samples=torch.arange(len(sequences)),
    )


CASES = [
    (batch([5, 6, 7]), [6, 7, 0], [0, 1, 2]),
    (batch([5, 6], [8], [9, 4, 3]), [6, 0, 0, 4, 3, 0], [0, 1, 0, 0, 1, 2]),
    (batch([], [5, 6], [], [7, 8], []), [6, 0, 8, 0], [0, 1, 0, 1]),
    (batch([5]), [0], [0]),
]


@pytest.mark.parametrize(("packed", "labels", "positions"), CASES)
def test_labels_and_positions(packed: PackedBatch, labels: list[int], positions: list[int]) -> None:
    """Labels never cross into the next sequence; positions restart in each."""
    assert next_tokens(packed).tolist() == labels
    assert position_ids(packed.cu_seqlens).tolist() == positions


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (CASES[0][0], [0, 1, 2]),
        (CASES[1][0], [0, 1, 0, 0, 4, 5]),
        (CASES[2][0], [0, 1, 0, 3]),
        (CASES[3][0], [0]),
    ],
)
def test_outputs_move_to_the_next_token(packed: PackedBatch, expected: list[float]) -> None:
    """Entry t comes from position t - 1; the first token of a sequence has none."""
    outputs = torch.arange(1.0, len(packed.tokens) + 1, requires_grad=True)
    moved = align_with_tokens(outputs, packed.cu_seqlens)
    assert moved.tolist() == expected
    moved.sum().backward()
    assert outputs.grad is not None
    # A last position speaks of no token, so nothing flows into it.
    assert outputs.grad.tolist() == [float(i + 1 in expected) for i in range(len(outputs))]


def test_labels_and_alignment_agree() -> None:
    """The label of output t - 1 is token t: aligned labels are the tokens themselves."""
    packed = CASES[1][0]
    aligned = align_with_tokens(next_tokens(packed), packed.cu_seqlens)
    assert aligned.tolist() == [0, 6, 0, 0, 4, 3]


def test_lengths_are_python_integers() -> None:
    """RoPE restarts at sequences only when Megatron gets plain ints."""
    params = packed_seq_params(CASES[1][0])
    assert type(params.max_seqlen_q) is int and params.max_seqlen_q == 3
    assert type(params.max_seqlen_kv) is int and params.max_seqlen_kv == 3
    assert params.cu_seqlens_q.dtype == torch.int32
