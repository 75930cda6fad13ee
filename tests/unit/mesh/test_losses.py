"""Loss sums and statistics of micro-batches: the total does not depend on the cut (C23)."""

from __future__ import annotations

import pytest
import torch

from megappo.mesh.losses import LossTotals, policy_loss_step, to_metrics, value_loss_step
from megappo.mesh.settings import PolicyLossSettings, UpdateMetrics, ValueLossSettings
from megappo.records import Experience, PackedBatch

CPU = torch.device("cpu")


def batch_of(mask: list[bool]) -> PackedBatch:
    """A micro-batch of one sequence."""
    total = len(mask)
    return PackedBatch(
        tokens=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, total], dtype=torch.int32),
        action_mask=torch.tensor(mask),
        engine_log_probs=torch.zeros(total),
        samples=torch.tensor([0]),
    )


def experience_of(advantages: list[float], values: list[float] | None = None) -> Experience:
    """Old log-probs 0; returns equal the advantages."""
    tensor = torch.tensor(advantages)
    old_values = None if values is None else torch.tensor(values)
    return Experience(torch.zeros(len(advantages)), None, old_values, tensor, tensor)


def policy_metrics(parts: list[LossTotals], settings: PolicyLossSettings) -> UpdateMetrics:
    """Metrics of a step made of these micro-batches."""
    return to_metrics(LossTotals.of(parts, CPU), settings, grad_norm=2.0, lr=0.5)


@pytest.mark.parametrize(
    ("micro_batches", "mean"),
    [([[1, 1, 1, 1], [5]], 1.8), ([[1, 1, 1, 1, 5]], 1.8), ([[1], [1], [1], [1], [5]], 1.8)],
)
def test_token_mean_over_the_step(micro_batches: list[list[float]], mean: float) -> None:
    """C23: token losses 1, 1, 1, 1 and 5 average to 1.8 however they are cut, not to 3."""
    parts, total = [], 0.0
    for losses in micro_batches:
        batch = batch_of([True] * len(losses))
        experience = experience_of([-x for x in losses])
        loss, totals = policy_loss_step(
            torch.zeros(len(losses)), None, batch, experience, PolicyLossSettings()
        )
        parts.append(totals)
        total += float(loss.detach())
    metrics = policy_metrics(parts, PolicyLossSettings())
    assert metrics.loss == pytest.approx(mean) == total / metrics.num_action_tokens
    assert metrics.ratio_mean == 1 and metrics.ratio_max_diff == 0 and metrics.approx_kl == 0
    assert metrics.clip_frac == 0 and metrics.entropy is None


def test_policy_statistics() -> None:
    """Clipping, ratio and entropy are read on action tokens only."""
    settings = PolicyLossSettings(entropy_coef=0.1)
    log_probs = torch.tensor([5.0, 0.5, 0.0], requires_grad=True)
    entropy = torch.tensor([9.0, 1.0, 3.0], requires_grad=True)
    batch = batch_of([False, True, True])
    loss, totals = policy_loss_step(
        log_probs, entropy, batch, experience_of([7.0, 1.0, 1.0]), settings
    )
    metrics = policy_metrics([totals], settings)
    ratio = float(torch.tensor(0.5).exp())
    assert metrics.clip_frac == 0.5 and metrics.num_action_tokens == 2
    assert metrics.ratio_mean == pytest.approx((ratio + 1) / 2)
    assert metrics.ratio_max_diff == pytest.approx(ratio - 1)
    assert metrics.loss == pytest.approx(-(1.2 + 1) / 2)
    assert metrics.entropy == pytest.approx(2.0)
    assert float(loss.detach()) == pytest.approx(-(1.2 + 1) - 0.1 * 4)
    loss.backward()
    assert log_probs.grad is not None and entropy.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0, -1.0]
    torch.testing.assert_close(entropy.grad, torch.tensor([0.0, -0.1, -0.1]))


def test_value_statistics() -> None:
    """The critic's share: mean loss, clipped share, mean value over action tokens."""
    settings = ValueLossSettings(value_clip=0.5)
    values = torch.tensor([9.0, 1.0, 2.0], requires_grad=True)
    experience = experience_of([0.0, 0.0, 1.0], values=[0.0, 1.0, 0.0])
    loss, totals = value_loss_step(values, batch_of([False, True, True]), experience, settings)
    metrics = to_metrics(LossTotals.of([totals], CPU), settings, grad_norm=2.0, lr=0.5)
    # errors: 1 and 1 (unclipped 2 - 1), against 0.5 - 1 clipped: the larger is the unclipped.
    assert float(loss.detach()) == pytest.approx(1.0)
    assert metrics.loss == pytest.approx(0.5) and metrics.value_mean == pytest.approx(1.5)
    assert metrics.clip_frac == 0 and metrics.grad_norm == 2 and metrics.lr == 0.5
    assert metrics.ratio_mean is None


def test_a_stage_without_losses_totals_zero() -> None:
    """Ranks that compute no loss hold zeros until the last stage's totals arrive."""
    totals = LossTotals.of([], CPU)
    assert not totals.sums.any() and not totals.maximum.any()
