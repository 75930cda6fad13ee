"""Samples to score, as the trainer would hand them to a reward function."""

from __future__ import annotations

from megappo.rewards.protocol import RewardSample


def sample(response: str, label: object = None) -> RewardSample:
    """A sample with this response and label."""
    return RewardSample("", response, label, 0, "stop", len(response))
