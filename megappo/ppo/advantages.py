"""From one score per sample to one advantage per token.

``shape_scores`` subtracts a group's baseline (estimators without a critic); ``token_rewards``
spreads scores and KL over tokens; ``gae`` or ``discounted_returns`` turns token rewards into
advantages; whitening comes last, in two parts, so that the caller can add up the statistics
of all ranks in between.

Legend: N samples, S sequences, T tokens end to end, A action tokens. Per-token arrays are
aligned with tokens; results are 0 where ``action_mask`` is False and inputs are never read
there. The functions know nothing about ranks, roles or configuration, and carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

AdvantageEstimator = Literal["gae", "reinforce", "rloo", "group_norm"]

# Whitening divides by at least this variance, group normalisation by at least its root.
VARIANCE_FLOOR = 1e-8


@torch.no_grad()
def shape_scores(
    scores: torch.Tensor, group_ids: torch.Tensor, estimator: AdvantageEstimator
) -> torch.Tensor:
    """Subtract the baseline of each sample's group, the samples of one prompt.

    ``rloo`` subtracts the mean of the *other* samples; ``group_norm`` subtracts the mean and
    divides by the sample standard deviation (at least 1e-4); ``gae`` and ``reinforce`` leave
    the scores alone. Under ``rloo`` and ``group_norm`` a group of one, and a group without
    spread, gets exactly 0.

    Args:
        scores: float [N].
        group_ids: int64 [N], equal for the samples of one prompt, in any order.
        estimator: The advantage estimator.

    Returns:
        float32 [N].

    Raises:
        ValueError: The estimator is unknown.
    """
    if estimator in ("gae", "reinforce"):
        return scores.float()
    if estimator not in ("rloo", "group_norm"):
        raise ValueError(
            f"algo.advantage.estimator is {estimator!r}; "
            "expected gae, reinforce, rloo or group_norm"
        )
    groups = torch.unique(group_ids, return_inverse=True)[1]
    # In float64 the mean of equal float32 scores is exact, so that zero spread gives zero.
    exact = scores.double()
    counts = torch.bincount(groups)
    sums = torch.zeros(len(counts), dtype=exact.dtype, device=exact.device)
    means = sums.index_add(0, groups, exact) / counts
    centred = exact - means[groups]
    others = (counts - 1).clamp(min=1)
    if estimator == "rloo":
        return (centred * (counts / others)[groups]).float()
    deviations = (sums.index_add(0, groups, centred.square()) / others).sqrt()
    return (centred / deviations.clamp(min=VARIANCE_FLOOR**0.5)[groups]).float()


@torch.no_grad()
def zero_spread_fraction(scores: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Share of groups whose scores are all equal, and which therefore teach nothing.

    Args:
        scores: float [N], before ``shape_scores``.
        group_ids: int64 [N].

    Returns:
        A number from 0 to 1; 0 without samples.
    """
    if not len(scores):
        return 0.0
    groups = torch.unique(group_ids, return_inverse=True)[1]
    bounds = scores.new_zeros(int(groups.max()) + 1)
    high = bounds.scatter_reduce(0, groups, scores, "amax", include_self=False)
    low = bounds.scatter_reduce(0, groups, scores, "amin", include_self=False)
    return float((high == low).double().mean())


@dataclass(frozen=True)
class _Actions:
    """The action tokens alone, gaps squeezed out; int64 [A] each.

    Attributes:
        index: Position of the token in the flat arrays.
        sequence: The sequence it belongs to.
        remaining: Action tokens from it to the end of its sequence, itself included.
    """

    index: torch.Tensor
    sequence: torch.Tensor
    remaining: torch.Tensor


def _actions(action_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> _Actions:
    index = action_mask.nonzero().squeeze(-1)
    ends = cu_seqlens[1:].long()
    sequence = torch.searchsorted(ends, index, right=True)
    action_ends = torch.bincount(sequence, minlength=len(ends)).cumsum(0)
    order = torch.arange(len(index), device=index.device)
    return _Actions(index, sequence, action_ends[sequence] - order)


def _spread(like: torch.Tensor, actions: _Actions, values: torch.Tensor) -> torch.Tensor:
    """Put ``values`` [A] back at their tokens: float32 [T], 0 elsewhere."""
    flat = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    flat[actions.index] = values
    return flat


def _discounted_sums(values: torch.Tensor, remaining: torch.Tensor, factor: float) -> torch.Tensor:
    """``out[t] = values[t] + factor * out[t + 1]`` within each sequence, by doubling.

    After the pass with ``step``, every sum covers the next ``2 * step`` tokens: the longest
    sequence of L action tokens takes log2(L) passes over flat arrays instead of L. What a
    token gets depends on its own sequence only, to the last bit.
    """
    longest = int(remaining.max()) if len(remaining) else 0
    sums = values
    step = 1
    while step < longest:
        ahead = torch.where(remaining[:-step] > step, sums[step:], 0.0)
        sums = torch.cat([sums[:-step] + factor**step * ahead, sums[-step:]])
        step *= 2
    return sums


@torch.no_grad()
def token_rewards(
    scores: torch.Tensor,
    kl: torch.Tensor | None,
    action_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """Spread the reward over tokens: the score on the last action token, KL on each of them.

    A sequence without action tokens (an empty response, a dummy) gives nothing, and dummies
    at the end need no score.

    Args:
        scores: float [S].
        kl: float [T], the estimate of each token; None without a reference policy.
        action_mask: bool [T].
        cu_seqlens: int [S + 1].
        kl_coef: Weight of the KL penalty.

    Returns:
        float32 [T].
    """
    actions = _actions(action_mask, cu_seqlens)
    if kl is None:
        rewards = torch.zeros(len(actions.index), dtype=torch.float32, device=action_mask.device)
    else:
        rewards = -kl_coef * kl[actions.index].float()
    last = actions.remaining == 1
    rewards[last] += scores[actions.sequence[last]].float()
    return _spread(action_mask, actions, rewards)


@torch.no_grad()
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    action_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lambd: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over the action tokens of each sequence.

    ``delta_t = r_t + gamma * V_next - V_t`` and ``A_t = delta_t + gamma * lambd * A_next``,
    where *next* is the next action token of the same sequence: tokens that an environment
    wrote in between take no step. Nothing follows the last action token (V_next = A_next = 0).

    Args:
        rewards: float [T].
        values: float [T], V of the state in which each token was chosen.
        action_mask: bool [T].
        cu_seqlens: int [S + 1].
        gamma: Discount per action token.
        lambd: GAE's lambda.

    Returns:
        Advantages and returns (the critic's targets, advantage + value), float32 [T] each.
    """
    actions = _actions(action_mask, cu_seqlens)
    reward = rewards[actions.index].float()
    value = values[actions.index].float()
    next_value = torch.where(actions.remaining > 1, value.roll(-1), 0.0)
    delta = reward + gamma * next_value - value
    advantage = _discounted_sums(delta, actions.remaining, gamma * lambd)
    return (
        _spread(action_mask, actions, advantage),
        _spread(action_mask, actions, advantage + value),
    )


@torch.no_grad()
def discounted_returns(
    rewards: torch.Tensor, action_mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Discounted sum of the rewards from each action token on: the advantage without a critic.

    Args:
        rewards: float [T].
        action_mask: bool [T].
        cu_seqlens: int [S + 1].
        gamma: Discount per action token.

    Returns:
        float32 [T].
    """
    actions = _actions(action_mask, cu_seqlens)
    sums = _discounted_sums(rewards[actions.index].float(), actions.remaining, gamma)
    return _spread(action_mask, actions, sums)


@torch.no_grad()
def whiten_statistics(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What one rank contributes to whitening; add it up over micro-batches and ranks.

    Args:
        x: float [T].
        mask: bool [T].

    Returns:
        float64 [3]: count, sum and sum of squares where ``mask`` is True. In float64 the
        squares of float32 numbers are exact, so that their sum can be used in one pass.
    """
    kept = torch.where(mask, x, 0.0).double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


@torch.no_grad()
def whiten_moments(statistics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance from summed ``whiten_statistics``.

    Args:
        statistics: float64 [3].

    Returns:
        Mean and variance, float64 scalars; 0 and 0 where nothing was counted.
    """
    count, total, squares = statistics.unbind()
    count = count.clamp(min=1)
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0)


@torch.no_grad()
def whiten(
    x: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> torch.Tensor:
    """Shift and scale ``x`` to mean 0 and variance 1 where ``mask`` is True.

    The variance is taken as at least 1e-8, so that equal values become 0.

    Args:
        x: float [T].
        mask: bool [T].
        mean: float64 scalar.
        var: float64 scalar, biased.

    Returns:
        float32 [T], 0 where ``mask`` is False.
    """
    scaled = (x.double() - mean) * var.clamp(min=VARIANCE_FLOOR).rsqrt()
    return torch.where(mask, scaled, 0.0).float()
