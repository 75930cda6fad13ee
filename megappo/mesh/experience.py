"""From log-probs, values and scores to advantages, on the last stage of each replica.

All micro-batches of a rollout batch are laid end to end, the mathematics of ``ppo`` runs on
the flat arrays once, and the result is cut back into micro-batches. The only things that
cross ranks are a handful of sums. This file knows no model and no process group: the caller
passes the reduction over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from megappo.mesh.settings import ExperienceMetrics, ExperienceSettings
from megappo.ppo.advantages import (
    discounted_returns,
    gae,
    token_rewards,
    whiten,
    whiten_moments,
    whiten_statistics,
)
from megappo.ppo.kl import estimate_kl
from megappo.records import Experience, PackedBatch

Reduction = Callable[[torch.Tensor], torch.Tensor]

NUM_SUMS = 10
"""Length of the vector of sums that ``make_experience`` returns."""


def make_experience(
    batches: Sequence[PackedBatch],
    log_probs: Sequence[torch.Tensor],
    ref_log_probs: Sequence[torch.Tensor] | None,
    values: Sequence[torch.Tensor] | None,
    scores: np.ndarray,
    settings: ExperienceSettings,
    summed: Reduction,
) -> tuple[list[Experience], torch.Tensor, torch.Tensor]:
    """Compute advantages (and returns) of this replica's micro-batches.

    Args:
        batches: all micro-batches of the rollout batch, of all steps.
        log_probs: float32 [T] of each micro-batch, by the trainer before its first update.
        ref_log_probs: the reference policy's; None runs without a KL penalty.
        values: the critic's, before its first update; None without a critic.
        scores: float32 [N], one per sample of the ``BatchPlan``.
        settings: how token rewards become advantages.
        summed: sums a float64 tensor over all replicas.

    Returns:
        One ``Experience`` per micro-batch; float64 [NUM_SUMS] sums and float64 [1] maximum
        of this replica, for ``to_metrics``.
    """
    mask = torch.cat([batch.action_mask for batch in batches])
    cu_seqlens = _joined_offsets(batches)
    flat_scores = torch.cat([_sequence_scores(batch, scores) for batch in batches])
    policy = _masked(log_probs, mask)
    ref = policy if ref_log_probs is None else _masked(ref_log_probs, mask)
    kl = estimate_kl(policy, ref, settings.kl_estimator)
    rewards = token_rewards(flat_scores, kl, mask, cu_seqlens, settings.kl_coef)
    value = None if values is None else _masked(values, mask)
    if settings.estimator == "gae":
        assert value is not None, "gae needs a critic"
        raw, returns = gae(rewards, value, mask, cu_seqlens, settings.gamma, settings.lambd)
    else:
        raw = returns = discounted_returns(rewards, mask, cu_seqlens, settings.gamma)
    statistics = whiten_statistics(raw, mask)
    advantages = raw
    if settings.whiten:
        advantages = whiten(raw, mask, *whiten_moments(summed(statistics.clone())))
    engine_diff = (torch.cat([b.engine_log_probs for b in batches]) - policy).abs()
    engine_diff = torch.where(mask, engine_diff, 0.0)
    by_token = [policy - ref, returns, torch.zeros_like(raw) if value is None else value]
    sums = [
        *_sample_sums(kl, rewards, mask, cu_seqlens),
        *statistics,
        *(x.double().sum() for x in (*by_token, engine_diff)),
    ]
    flat = Experience(
        log_probs=policy,
        ref_log_probs=None if ref_log_probs is None else ref,
        values=value,
        advantages=advantages,
        returns=None if value is None else returns,
    )
    return _cut(flat, batches), torch.stack(sums), engine_diff.max().double().reshape(1)


def _cut(flat: Experience, batches: Sequence[PackedBatch]) -> list[Experience]:
    """One experience of all micro-batches into one for each."""
    sizes = [len(batch.tokens) for batch in batches]

    def split(column: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        return [None] * len(sizes) if column is None else column.split(sizes)

    return [
        Experience(log_probs, ref, values, advantages, returns)
        for log_probs, ref, values, advantages, returns in zip(
            flat.log_probs.split(sizes),
            split(flat.ref_log_probs),
            split(flat.values),
            flat.advantages.split(sizes),
            split(flat.returns),
            strict=True,
        )
    ]


def to_metrics(sums: torch.Tensor, maximum: torch.Tensor, has_values: bool) -> ExperienceMetrics:
    """Metrics from the sums (float64 [NUM_SUMS]) and maximum ([1]) over all replicas."""
    samples, kl, reward, tokens, _, _, diff, returns, value, engine = sums.tolist()
    per_sample, per_token = max(samples, 1.0), max(tokens, 1.0)
    mean, variance = whiten_moments(sums[3:6])
    return ExperienceMetrics(
        num_action_tokens=int(tokens),
        kl=kl / per_sample,
        kl_reward=reward / per_sample,
        log_probs_diff=diff / per_token,
        advantage_mean=float(mean),
        advantage_std=float(variance.sqrt()),
        value_mean=value / per_token if has_values else None,
        return_mean=returns / per_token,
        engine_diff_mean=engine / per_token,
        engine_diff_max=float(maximum[0]),
    )


def _masked(parts: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Micro-batches end to end, float32 [T], 0 where no action."""
    return torch.where(mask, torch.cat(list(parts)).float(), 0.0)


def _joined_offsets(batches: Sequence[PackedBatch]) -> torch.Tensor:
    """int64 [S + 1] offsets of the sequences of all micro-batches, dummies included."""
    lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches]).long()
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _sequence_scores(batch: PackedBatch, scores: np.ndarray) -> torch.Tensor:
    """float32 [S], 0 for the dummy sequence."""
    out = torch.zeros(len(batch.cu_seqlens) - 1, device=batch.tokens.device)
    chosen = torch.from_numpy(scores[batch.samples.cpu().numpy()])
    out[: len(batch.samples)] = chosen.to(out.device, torch.float32)
    return out


def _sample_sums(
    kl: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples with action tokens; sums over them of mean KL per token, and of token rewards."""
    sequence = torch.repeat_interleave(
        torch.arange(len(cu_seqlens) - 1, device=mask.device), cu_seqlens.diff()
    )
    zeros = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float64, device=mask.device)
    tokens = zeros.index_add(0, sequence, mask.double())
    sample_kl = zeros.index_add(0, sequence, kl.double())
    counted = (tokens > 0).double().sum()
    return counted, (sample_kl / tokens.clamp(min=1)).sum(), rewards.double().sum()
