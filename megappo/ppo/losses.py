"""Per-token losses of policy and critic, and the statistics that come with them.

Nothing is averaged here: the caller sums over its tokens and divides by the number of action
tokens of the *global* optimizer step, so that the loss does not depend on how the step is cut
into micro-batches and replicas. All results are float32 [T] and 0 where ``action_mask`` is
False, whatever the inputs hold there; gradients there are 0 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.ppo.kl import MAX_LOG_RATIO, estimate_kl


@dataclass(frozen=True)
class PolicyLoss:
    """Result of ``policy_loss``; all float32 [T], 0 on tokens that are no actions.

    Attributes:
        loss: The loss of each token; the only one with a gradient.
        ratio: Probability of the token under the policy over that under the old policy.
        clipped: 1 where clipping the ratio makes the objective smaller, else 0.
        approx_kl: k3 estimate of KL(old policy || policy).
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    approx_kl: torch.Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Result of ``value_loss``; float32 [T] each, 0 on tokens that are no actions.

    Attributes:
        loss: The loss of each token; the only one with a gradient.
        clipped: 1 where the clipped value has the larger error, else 0.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    action_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated: ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    With ``dual_clip`` the loss of a negative advantage is at most ``-dual_clip * A``. The
    log-ratio is bounded to ±20 before ``exp``.

    Args:
        log_probs: float [T], of the policy; carries the gradient.
        old_log_probs: float [T], of the policy before the first update of the rollout batch.
        advantages: float [T].
        action_mask: bool [T].
        clip_low: Clip range of the ratio below 1.
        clip_high: Clip range of the ratio above 1.
        dual_clip: Larger than 1, or None.

    Returns:
        Losses and statistics, see ``PolicyLoss``.
    """
    assert dual_clip is None or dual_clip > 1
    new = torch.where(action_mask, log_probs.float(), 0.0)
    old = torch.where(action_mask, old_log_probs.detach().float(), 0.0)
    advantage = torch.where(action_mask, advantages.detach().float(), 0.0)
    ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    surrogate = ratio * advantage
    clipped_surrogate = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    objective = torch.minimum(surrogate, clipped_surrogate)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantage)
        objective = torch.where(advantage < 0, bounded, objective)
    return PolicyLoss(
        loss=-objective,
        ratio=torch.where(action_mask, ratio.detach(), 0.0),
        clipped=(clipped_surrogate < surrogate).float(),
        approx_kl=estimate_kl(old, new.detach(), "k3"),
    )


def entropy_loss(
    entropy: torch.Tensor, action_mask: torch.Tensor, entropy_coef: float
) -> torch.Tensor:
    """The entropy bonus as a loss, ``-entropy_coef * entropy``, to be added to the policy's.

    Args:
        entropy: float [T], of the policy's distribution for each token; carries the gradient.
        action_mask: bool [T].
        entropy_coef: Weight of the bonus.

    Returns:
        float32 [T].
    """
    return -entropy_coef * torch.where(action_mask, entropy.float(), 0.0)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    action_mask: torch.Tensor,
    *,
    value_clip: float | None,
) -> ValueLoss:
    """Half the squared error; with clipping, the larger of it and the clipped value's.

    ``0.5 * max((V - R)², (V_old + clip(V - V_old, ±value_clip) - R)²)``.

    Args:
        values: float [T], of the critic; carries the gradient.
        old_values: float [T], of the critic before the first update of the rollout batch.
        returns: float [T], the targets.
        action_mask: bool [T].
        value_clip: Clip range around the old value; None turns clipping off.

    Returns:
        Losses and statistics, see ``ValueLoss``.
    """
    value = torch.where(action_mask, values.float(), 0.0)
    old = torch.where(action_mask, old_values.detach().float(), 0.0)
    target = torch.where(action_mask, returns.detach().float(), 0.0)
    error = (value - target).square()
    if value_clip is None:
        return ValueLoss(loss=0.5 * error, clipped=torch.zeros_like(target))
    moved = value - old
    # Within the range the value itself, so that rounding is never taken for clipping.
    near = torch.where(moved.abs() <= value_clip, value, old + moved.clamp(-value_clip, value_clip))
    clipped_error = (near - target).square()
    return ValueLoss(
        loss=0.5 * torch.maximum(error, clipped_error),
        clipped=(clipped_error > error).float(),
    )
