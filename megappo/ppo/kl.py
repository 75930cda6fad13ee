"""Per-token estimates of the KL divergence between two policies.

Both log-probabilities are those of the tokens that were drawn from the first policy. The
same estimate enters the token rewards and the log. This module knows nothing about masks:
callers read the estimate on action tokens only.
"""

from __future__ import annotations

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) = 4.9e8: far beyond any useful penalty, and sums over a batch stay within float32.
MAX_LOG_RATIO = 20.0


def estimate_kl(
    log_probs: torch.Tensor, base_log_probs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """Estimate KL(policy || base) token by token.

    With ``d = log_probs - base_log_probs``: k1 is ``d`` (unbiased, may be negative), k2 is
    ``d² / 2`` (biased, not negative), k3 is ``exp(-d) - 1 + d`` (unbiased, not negative).
    k1 and k2 are never clamped. k3 takes ``d`` below -20 as -20, where ``exp`` alone would
    overflow; elsewhere it is exact.

    Args:
        log_probs: float [T], of the policy that drew the tokens.
        base_log_probs: float [T], of the policy it is compared with.
        estimator: k1, k2 or k3.

    Returns:
        float32 [T].

    Raises:
        ValueError: The estimator is unknown.
    """
    log_ratio = log_probs.float() - base_log_probs.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        bounded = log_ratio.clamp(min=-MAX_LOG_RATIO)
        # expm1 keeps small divergences exact; rounding must not make the sum negative.
        return (torch.expm1(-bounded) + bounded).clamp(min=0)
    raise ValueError(f"algo.kl.estimator is {estimator!r}; expected k1, k2 or k3")
