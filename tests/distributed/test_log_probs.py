"""Vocabulary-parallel log-probabilities and entropies over gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megappo.models.log_probs import log_probs_and_entropy
from tests.support.ranks import run_ranks

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(
    num_tokens: int, columns: int, vocab: int, dtype: torch.dtype, padding: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Full logits [T, columns], labels that reach every rank, upstream gradients [2, T]."""
    generator = torch.Generator().manual_seed(columns)
    logits = 3 * torch.randn(num_tokens, columns, generator=generator)
    logits[:, vocab:] += padding
    labels = torch.arange(num_tokens) * 7 % vocab
    return logits.to(dtype), labels, torch.randn(2, num_tokens, generator=generator)


def _on_rank(
    rank: int, world: int, columns: int, vocab: int, dtype: torch.dtype, chunk_tokens: int
) -> Result:
    """Log-probs, entropies and the gradient of this rank's columns."""
    logits, labels, upstream = _inputs(60, columns, vocab, dtype, padding=50.0)
    leaf = logits.chunk(world, dim=1)[rank].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        leaf,
        labels,
        temperature=0.7,
        vocab_size=vocab,
        tp_group=dist.group.WORLD,
        tp_rank=rank,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    assert entropy is not None
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert leaf.grad is not None
    return log_probs.detach(), entropy.detach(), leaf.grad


def _full(columns: int, vocab: int, dtype: torch.dtype) -> Result:
    """The same by one softmax in float64 over the true vocabulary."""
    logits, labels, upstream = _inputs(60, columns, vocab, dtype, padding=50.0)
    leaf = logits.double().requires_grad_()
    log_softmax = torch.log_softmax(leaf[:, :vocab] / 0.7, dim=-1)
    log_probs = log_softmax.gather(1, labels[:, None]).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert leaf.grad is not None
    return log_probs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize(
    ("world", "columns", "vocab", "chunk_tokens"),
    [
        (2, 112, 101, 1),
        (2, 112, 101, 7),
        (2, 112, 101, 1024),
        (2, 96, 96, 16),
        (4, 112, 101, 13),
        (4, 16, 5, 60),
    ],
)
def test_equal_to_the_full_softmax(world: int, columns: int, vocab: int, chunk_tokens: int) -> None:
    """Forward and backward at TP2 and TP4, padded by 50; at (4, 16, 5) ranks hold padding only."""
    results = run_ranks(world, _on_rank, world, columns, vocab, torch.float32, chunk_tokens)
    expected = _full(columns, vocab, torch.float32)
    for log_probs, entropy, _ in results:
        assert torch.equal(log_probs, results[0][0]) and torch.equal(entropy, results[0][1])
        assert torch.allclose(log_probs.double(), expected[0], rtol=1e-6, atol=1e-6)
        assert torch.allclose(entropy.double(), expected[1], rtol=1e-6, atol=1e-6)
    gradient = torch.cat([result[2] for result in results], dim=1)
    assert not gradient[:, vocab:].any()
    assert torch.allclose(gradient.double(), expected[2], rtol=0, atol=1e-6 / 0.7)


def test_bf16_logits() -> None:
    """Values as exact as in float32; the gradient is rounded to bf16 once."""
    results = run_ranks(2, _on_rank, 2, 112, 101, torch.bfloat16, 16)
    expected = _full(112, 101, torch.bfloat16)
    assert torch.allclose(results[0][0].double(), expected[0], rtol=1e-6, atol=1e-6)
    gradient = torch.cat([result[2] for result in results], dim=1)
    assert gradient.dtype == torch.bfloat16
    assert torch.allclose(gradient.double(), expected[2], rtol=2**-8, atol=1e-5)


def _masked_on_rank(rank: int, world: int) -> Result:
    """Log-probs, entropies and gradient where rank 0 has no column that is not masked out."""
    logits, labels, upstream = _inputs(60, 96, 96, torch.float32, padding=0.0)
    logits[:, : 96 // world] = -torch.inf
    labels = labels.clamp(min=96 // world)
    leaf = logits.chunk(world, dim=1)[rank].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        leaf,
        labels,
        temperature=0.7,
        vocab_size=96,
        tp_group=dist.group.WORLD,
        tp_rank=rank,
        chunk_tokens=16,
        with_entropy=True,
    )
    assert entropy is not None
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert leaf.grad is not None
    return log_probs.detach(), entropy.detach(), leaf.grad


def test_c29_a_rank_whose_columns_are_all_masked_out() -> None:
    """Its columns have no part in results and no gradient; everything stays finite."""
    (first, second) = run_ranks(2, _masked_on_rank, 2)
    logits, labels, upstream = _inputs(60, 96, 96, torch.float32, padding=0.0)
    leaf = logits[:, 48:].double().requires_grad_()
    log_softmax = torch.log_softmax(leaf / 0.7, dim=-1)
    log_probs = log_softmax.gather(1, labels.clamp(min=48)[:, None] - 48).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert leaf.grad is not None
    for result in (first, second):
        assert torch.allclose(result[0].double(), log_probs, rtol=1e-6, atol=1e-6)
        assert torch.allclose(result[1].double(), entropy, rtol=1e-6, atol=1e-6)
    assert not first[2].any()
    assert torch.allclose(second[2].double(), leaf.grad, rtol=0, atol=1e-6 / 0.7)
