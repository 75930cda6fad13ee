"""Chunked log-probabilities and entropies on one rank, against the full softmax and TRL."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from megappo.models.log_probs import log_probs_and_entropy

VOCAB = 101
PADDED = 112


def _inputs(num_tokens: int = 128, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Logits [T, 112], labels below 101, and two upstream gradients [T]."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = (3 * torch.randn(num_tokens, PADDED, generator=generator)).to(dtype)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    upstream = torch.randn(2, num_tokens, generator=generator)
    return logits, labels, upstream[0], upstream[1]


def _full(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook: slice off the padding, log-softmax in float64, gather, sum."""
    log_softmax = torch.log_softmax(logits[:, :VOCAB].double() / temperature, dim=-1)
    picked = log_softmax.gather(1, labels[:, None]).squeeze(1)
    return picked, -(log_softmax.exp() * log_softmax).sum(-1)


def _chunked(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    vocab_size: int = VOCAB,
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropy = log_probs_and_entropy(
        logits,
        labels,
        temperature=temperature,
        vocab_size=vocab_size,
        tp_group=None,
        tp_rank=0,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    assert entropy is not None
    return log_probs, entropy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 128, 10**9])
def test_forward_and_backward_equal_the_full_softmax(temperature: float, chunk_tokens: int) -> None:
    """Values and gradients of both results within 1e-6 (values relative to their size)."""
    logits, labels, up_log_prob, up_entropy = _inputs()
    exact = logits.double().requires_grad_()
    expected = _full(exact, labels, temperature)
    ((expected[0] * up_log_prob).sum() + (expected[1] * up_entropy).sum()).backward()
    leaf = logits.clone().requires_grad_()
    result = _chunked(leaf, labels, temperature, chunk_tokens)
    ((result[0] * up_log_prob).sum() + (result[1] * up_entropy).sum()).backward()
    for got, want in zip(result, expected, strict=True):
        assert got.dtype == torch.float32
        assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)
    assert leaf.grad is not None and exact.grad is not None
    assert torch.allclose(leaf.grad.double(), exact.grad, rtol=0, atol=1e-6 / temperature)
    assert not leaf.grad[:, VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c29_chunks_do_not_change_a_bit(dtype: torch.dtype) -> None:
    """C29: chunks of 1, 7, 100 and everything at once: same values, same gradient."""
    logits, labels, up_log_prob, up_entropy = _inputs(100, dtype)
    results = []
    for chunk_tokens in (1, 7, 100, 10**9):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = _chunked(leaf, labels, 0.8, chunk_tokens)
        ((log_probs * up_log_prob).sum() + (entropy * up_entropy).sum()).backward()
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        results.append(torch.cat([log_probs.detach(), entropy.detach(), leaf.grad.flatten()]))
    for result in results[:-1]:
        assert (result - results[-1]).abs().max() <= 1e-6


def test_bf16_logits_are_computed_in_float32() -> None:
    """The only rounding is that of the gradient to the logits' type."""
    logits, labels, up_log_prob, _ = _inputs(64, torch.bfloat16)
    exact = logits.double().requires_grad_()
    expected, _ = _full(exact, labels, 0.7)
    (expected * up_log_prob).sum().backward()
    leaf = logits.clone().requires_grad_()
    log_probs, _ = _chunked(leaf, labels, 0.7, 16)
    (log_probs * up_log_prob).sum().backward()
    assert torch.allclose(log_probs.double(), expected, rtol=1e-6, atol=1e-6)
    assert leaf.grad is not None and exact.grad is not None
    assert torch.allclose(leaf.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


def test_trl_agrees() -> None:
    """TRL's selective_log_softmax and entropy_from_logits as oracle, without padding."""
    logits, labels, _, _ = _inputs()
    log_probs, entropy = _chunked(logits, labels, chunk_tokens=50, vocab_size=PADDED)
    assert torch.allclose(log_probs, selective_log_softmax(logits, labels), atol=2e-6)
    assert torch.allclose(entropy, entropy_from_logits(logits), atol=2e-6)


@pytest.mark.parametrize(
    ("logits", "temperature", "token", "expected"),
    [
        ([2.0, 0.0], 0.5, 0, -0.018150),
        ([2.0, 0.0], 1.0, 0, -0.126928),
        ([2.0, 0.0], 0.5, 1, -4.018150),
        ([0.0, 0.0], 0.1, 1, -0.693147),
        ([1.0, 3.0], 2.0, 0, -1.313262),
    ],
)
def test_c24_temperature(
    logits: list[float], temperature: float, token: int, expected: float
) -> None:
    """C24: the sampling temperature divides the logits, in float32 also for bf16 logits."""
    for dtype in (torch.float32, torch.bfloat16):
        log_probs, _ = _chunked(
            torch.tensor([logits], dtype=dtype), torch.tensor([token]), temperature, vocab_size=2
        )
        assert log_probs.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("padding", [50.0, 1e30, -torch.inf, torch.inf, torch.nan])
def test_c16_padded_columns_have_no_effect(padding: float) -> None:
    """C16: columns 101-111 raised by 50, or worse: probabilities over 0-100 still sum to 1."""
    logits, labels, up_log_prob, up_entropy = _inputs(101)
    raised = logits.clone()
    raised[:, VOCAB:] += padding
    gradients = []
    for version in (logits, raised):
        leaf = version.clone().requires_grad_()
        log_probs, entropy = _chunked(leaf, labels, 0.9, 13)
        assert torch.isfinite(entropy).all()
        ((log_probs * up_log_prob).sum() + (entropy * up_entropy).sum()).backward()
        assert leaf.grad is not None
        gradients.append(torch.cat([log_probs.detach(), entropy.detach(), leaf.grad.flatten()]))
    assert torch.equal(*gradients)
    row = raised[:1].expand(VOCAB, PADDED)
    every_token, _ = _chunked(row, torch.arange(VOCAB))
    assert every_token.double().exp().sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c29_masked_out_vocabulary(dtype: torch.dtype, temperature: float) -> None:
    """-inf inside of the vocabulary: results of the rest alone; finite, with a gradient of 0."""
    logits, labels, up_log_prob, up_entropy = _inputs(90, dtype)
    kept = torch.arange(VOCAB) % 3 != 1
    labels = labels - (labels % 3 == 1).long()
    logits[:, :VOCAB][:, ~kept] = -torch.inf
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = _chunked(leaf, labels, temperature, 13)
    ((log_probs * up_log_prob).sum() + (entropy * up_entropy).sum()).backward()

    exact = logits[:, :VOCAB][:, kept].double().requires_grad_()
    log_softmax = torch.log_softmax(exact / temperature, dim=-1)
    among_kept = kept.cumsum(0)[labels] - 1
    expected = log_softmax.gather(1, among_kept[:, None]).squeeze(1)
    expected_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    ((expected * up_log_prob).sum() + (expected_entropy * up_entropy).sum()).backward()
    assert torch.allclose(log_probs.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(entropy.double(), expected_entropy, rtol=1e-6, atol=1e-6)
    assert leaf.grad is not None and exact.grad is not None
    assert not leaf.grad[:, :VOCAB][:, ~kept].any()
    rtol = 2**-8 if dtype == torch.bfloat16 else 0
    got = leaf.grad[:, :VOCAB][:, kept].double()
    assert torch.allclose(got, exact.grad, rtol=rtol, atol=1e-6 / temperature)


def test_entropy_is_not_built_when_unused() -> None:
    """Without entropy the second result is None, and the first is the same to the bit."""
    logits, labels, up_log_prob, _ = _inputs()
    plain = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        plain,
        labels,
        temperature=1.0,
        vocab_size=VOCAB,
        tp_group=None,
        tp_rank=0,
        with_entropy=False,
    )
    assert entropy is None
    (log_probs * up_log_prob).sum().backward()
    both = logits.clone().requires_grad_()
    with_entropy, _ = _chunked(both, labels)
    (with_entropy * up_log_prob).sum().backward()
    assert torch.equal(log_probs, with_entropy)
    assert plain.grad is not None and both.grad is not None
    assert torch.equal(plain.grad, both.grad)


def test_entropy_alone_has_the_right_gradient() -> None:
    """A loss that uses the entropy only."""
    logits, labels, _, up_entropy = _inputs()
    exact = logits.double().requires_grad_()
    (_full(exact, labels, 1.3)[1] * up_entropy).sum().backward()
    leaf = logits.clone().requires_grad_()
    (_chunked(leaf, labels, 1.3, 9)[1] * up_entropy).sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    assert torch.allclose(leaf.grad.double(), exact.grad, rtol=0, atol=1e-6)


def test_large_logits_and_far_labels_stay_finite() -> None:
    """Logits of thousands: exact zero probabilities, finite results and gradients."""
    leaf = torch.tensor([[9000.0, -9000.0, 0.0], [1e5, 1e5, -1e5]], requires_grad=True)
    log_probs, entropy = _chunked(leaf, torch.tensor([1, 0]), 0.5, vocab_size=3)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.tolist() == pytest.approx([-36000.0, -0.693147])
    assert entropy.tolist() == pytest.approx([0.0, 0.693147], abs=1e-6)
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_no_tokens() -> None:
    """An empty batch gives empty results."""
    log_probs, entropy = _chunked(torch.zeros(0, PADDED), torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)


_MEASURE = """
import sys, torch
from megappo.models.log_probs import log_probs_and_entropy
torch.set_num_threads(1)

def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def run(num_tokens, vocab):
    logits = torch.ones(num_tokens, vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    before = peak_kib()
    log_probs, entropy = log_probs_and_entropy(
        logits, labels, temperature=0.7, vocab_size=vocab, tp_group=None, tp_rank=0,
        chunk_tokens=int(sys.argv[1]), with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    return (peak_kib() - before) / 1024

run(8, 100)
print(run(512, 32000))
"""


def _peak_mib(chunk_tokens: int) -> float:
    """Growth of the peak memory in a forward and backward pass, in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(chunk_tokens)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return float(process.stdout)


def test_c29_memory_is_bounded_by_the_chunk() -> None:
    """C29: T=512, V=32000, bf16: the gradient (31 MiB) and two fp32 chunks, not fp32 [T, V]."""
    row = 32000 / 2**20
    gradient = 2 * 512 * row
    assert _peak_mib(128) < gradient + 3 * (4 * 128 * row)
    assert _peak_mib(16) < gradient + 4 * (4 * 16 * row)
    assert _peak_mib(512) > gradient + 4 * 512 * row
