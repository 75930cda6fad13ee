"""Scores from the driver's side: clip the rewards, subtract the group's baseline.

Turns rewards into one float per sample; knows neither tokens nor advantages per
token, which are computed on the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.config.schema import Config
from megappo.ppo.advantages import shape_scores, zero_spread_fraction
from megappo.rewards.protocol import Score
from megappo.trainer.sampling import RolloutBatch


@dataclass(frozen=True)
class ScoredBatch:
    """A rollout batch with its scores, one per sample in the batch's order.

    Attributes:
        rollouts: the batch.
        rewards: what the reward said, unclipped, with its named parts.
        scores: float32 [N], clipped and with the group's baseline taken off.
        zero_spread: share of prompts whose samples all got the same score.
    """

    rollouts: RolloutBatch
    rewards: tuple[Score, ...]
    scores: torch.Tensor
    zero_spread: float


def score(rewards: tuple[Score, ...], rollouts: RolloutBatch, args: Config) -> ScoredBatch:
    """What a rollout batch's rewards, one per sample, are to training."""
    low, high = args.reward.clip_range
    clipped = torch.tensor([r.reward for r in rewards], dtype=torch.float32).clamp(low, high)
    groups = torch.arange(len(rewards)) // rollouts.n_samples_per_prompt
    return ScoredBatch(
        rollouts,
        rewards,
        shape_scores(clipped, groups, args.algo.advantage.estimator),
        zero_spread_fraction(clipped, groups),
    )
