"""Binds the mathematics of the losses to a role: model output in, loss sum and statistics out.

``policy_loss_step`` and ``value_loss_step`` handle one micro-batch on a last-stage rank and
average nothing: the loss is a sum over action tokens and so is every statistic, so that the
step's result does not depend on how it was cut. ``to_metrics`` divides at the end, by the
action tokens of the whole step. This file knows no model, schedule or process group.

Legend: T tokens. A ``LossTotals`` adds up over micro-batches and replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.mesh.settings import PolicyLossSettings, UpdateMetrics, ValueLossSettings
from megappo.ppo.losses import entropy_loss, policy_loss, value_loss
from megappo.records import Experience, PackedBatch

LossSettings = PolicyLossSettings | ValueLossSettings

NUM_SUMS = 6
"""Action tokens, loss, clipped tokens, then by loss: policy ratio, approx_kl, entropy; values."""


@dataclass(frozen=True)
class LossTotals:
    """Statistics of some micro-batches: float64 [NUM_SUMS] sums and float64 [1] maximum."""

    sums: torch.Tensor
    maximum: torch.Tensor

    @staticmethod
    def of(parts: Sequence[LossTotals], device: torch.device) -> LossTotals:
        """Total of ``parts``; zeros where there are none (stages that compute no loss)."""
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
        maximum = torch.zeros(1, dtype=torch.float64, device=device)
        for part in parts:
            sums = sums + part.sums
            maximum = torch.maximum(maximum, part.maximum)
        return LossTotals(sums, maximum)


def policy_loss_step(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    batch: PackedBatch,
    experience: Experience,
    settings: PolicyLossSettings,
) -> tuple[torch.Tensor, LossTotals]:
    """Policy loss of one micro-batch.

    Args:
        log_probs: float32 [T] of the policy, with gradient.
        entropy: float32 [T] with gradient, or None.
        batch: the micro-batch.
        experience: its frozen log-probs and advantages.
        settings: clip ranges and entropy weight.

    Returns:
        The sum over action tokens of the loss (entropy bonus included), and the totals.
    """
    result = policy_loss(
        log_probs,
        experience.log_probs,
        experience.advantages,
        batch.action_mask,
        clip_low=settings.eps_clip_low,
        clip_high=settings.eps_clip_high,
        dual_clip=settings.dual_clip,
    )
    loss = result.loss.sum()
    entropy_sum = loss.new_zeros(())
    if entropy is not None and settings.entropy_coef is not None:
        entropy_sum = torch.where(batch.action_mask, entropy.detach(), 0.0).sum()
        bonus = entropy_loss(entropy, batch.action_mask, settings.entropy_coef).sum()
    statistics = [result.loss, result.clipped, result.ratio, result.approx_kl]
    sums = [batch.action_mask.sum(), *(x.detach().double().sum() for x in statistics), entropy_sum]
    maximum = torch.where(batch.action_mask, (result.ratio - 1).abs(), 0.0).max()
    totals = LossTotals(torch.stack([x.double() for x in sums]), maximum.double().reshape(1))
    return (loss + bonus if entropy is not None else loss), totals


def value_loss_step(
    values: torch.Tensor,
    batch: PackedBatch,
    experience: Experience,
    settings: ValueLossSettings,
) -> tuple[torch.Tensor, LossTotals]:
    """Value loss of one micro-batch.

    Args:
        values: float32 [T] of the critic, with gradient.
        batch: the micro-batch.
        experience: its frozen values and returns.
        settings: clip range.

    Returns:
        The sum over action tokens of the loss, and the totals.
    """
    assert experience.values is not None and experience.returns is not None
    result = value_loss(
        values,
        experience.values,
        experience.returns,
        batch.action_mask,
        value_clip=settings.value_clip,
    )
    masked = torch.where(batch.action_mask, values.detach(), 0.0)
    sums = [batch.action_mask.sum(), result.loss.detach(), result.clipped, masked]
    vector = torch.stack([x.double().sum() for x in sums])
    padded = torch.cat([vector, vector.new_zeros(NUM_SUMS - len(vector))])
    return result.loss.sum(), LossTotals(padded, padded.new_zeros(1))


def to_metrics(
    totals: LossTotals, settings: LossSettings, grad_norm: float, lr: float
) -> UpdateMetrics:
    """Metrics of an optimizer step from the totals of all replicas."""
    sums = totals.sums.tolist()
    tokens = max(sums[0], 1.0)
    mean = [x / tokens for x in sums]
    if isinstance(settings, ValueLossSettings):
        return UpdateMetrics(
            skipped=False,
            num_action_tokens=int(sums[0]),
            loss=mean[1],
            clip_frac=mean[2],
            grad_norm=grad_norm,
            lr=lr,
            value_mean=mean[3],
        )
    return UpdateMetrics(
        skipped=False,
        num_action_tokens=int(sums[0]),
        loss=mean[1],
        clip_frac=mean[2],
        grad_norm=grad_norm,
        lr=lr,
        ratio_mean=mean[3],
        ratio_max_diff=float(totals.maximum[0]),
        approx_kl=mean[4],
        entropy=None if settings.entropy_coef is None else mean[5],
    )
