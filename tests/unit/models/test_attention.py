"""The packed attention core against plain softmax attention, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megappo.models.attention import PackedAttention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def core(window: int | None = None) -> PackedAttention:
    """One layer's core; a token sees ``window`` tokens, itself included."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=HEADS,
        window_size=None if window is None else (window - 1, 0),
    )
    return PackedAttention(config, layer_number=1)


def packed(lengths: list[int]) -> PackedSeqParams:
    """Sequences of these lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def draw(lengths: list[int], kv_heads: int = KV_HEADS) -> tuple[torch.Tensor, ...]:
    """Random query, key, value for these lengths."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return tuple(
        torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, kv_heads, kv_heads)
    )


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Causal attention of one sequence, written out; float64 [L, heads * head_dim]."""
    q, k, v = (x.double() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    here, there = torch.arange(len(q))[:, None], torch.arange(len(q))
    unseen = (there > here) | (there <= here - (window or len(q)))
    scores.masked_fill_(unseen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths", [[1], [7], [5, 5, 5], [3, 9, 9, 1, 1, 4], [0, 6, 0, 2], [1, 1, 1, 33]]
)
def test_equals_softmax_attention(lengths: list[int], kv_heads: int, window: int | None) -> None:
    """Outputs and gradients are those of each sequence alone, for runs of equal length too."""
    q, k, v = draw(lengths, kv_heads)
    output = core(window)(q, k, v, None, packed_seq_params=packed(lengths))
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([softmax_attention(a, b, c, window) for a, b, c in parts])
    torch.testing.assert_close(output, expected.float(), rtol=0, atol=2e-6)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)


@pytest.mark.parametrize("lengths", [[4, 6, 5], [6, 6, 6], [1, 6, 12]])
def test_no_token_sees_another_sequence(lengths: list[int]) -> None:
    """Replacing the neighbours leaves the middle sequence's output equal, bit for bit."""
    q, k, v = draw(lengths)
    middle = slice(lengths[0], lengths[0] + lengths[1])
    before = core()(q, k, v, None, packed_seq_params=packed(lengths))
    changed = []
    for x in (q, k, v):
        y = 100 * torch.ones_like(x)
        y[middle] = x[middle].detach()
        changed.append(y)
    after = core()(*changed, None, packed_seq_params=packed(lengths))
    assert torch.equal(before[middle], after[middle])
    assert not torch.equal(before, after)
