"""Losses per token: hand-computed numbers, independent loops, and invariance to cuts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.ppo.losses import entropy_loss, policy_loss, value_loss
from tests.unit.ppo.ragged import Ragged, few_examples, make_ragged, ragged_batches


def test_policy_loss_by_hand() -> None:
    """Ratios below, inside and above the clip range, with advantages of both signs."""
    ratio = torch.tensor([0.5, 0.5, 1.1, 1.5, 1.5])
    advantage = torch.tensor([2.0, -2.0, 2.0, 2.0, -2.0])
    mask = torch.ones(5, dtype=torch.bool)
    result = policy_loss(ratio.log(), torch.zeros(5), advantage, mask, clip_low=0.2, clip_high=0.3)
    assert result.loss.tolist() == pytest.approx([-1.0, 1.6, -2.2, -2.6, 3.0])
    assert result.clipped.tolist() == [0, 1, 0, 1, 0]
    assert result.ratio.tolist() == pytest.approx(ratio.tolist())
    assert result.approx_kl.tolist() == pytest.approx(
        [r - 1 - math.log(r) for r in ratio.tolist()], abs=1e-6
    )


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    """A ratio of 10 costs 3 times the advantage at most; positive advantages do not change."""
    ratio = torch.tensor([10.0, 10.0, 2.0])
    advantage = torch.tensor([-1.0, 1.0, -1.0])
    mask = torch.ones(3, dtype=torch.bool)
    inputs = ratio.log(), torch.zeros(3), advantage, mask
    plain = policy_loss(*inputs, clip_low=0.2, clip_high=0.2)
    dual = policy_loss(*inputs, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert plain.loss.tolist() == pytest.approx([10.0, -1.2, 2.0])
    assert dual.loss.tolist() == pytest.approx([3.0, -1.2, 2.0])


def test_value_loss_by_hand() -> None:
    """The larger of the plain and the clipped error counts, and half of it."""
    values = torch.tensor([1.0, 1.0, 0.3, 0.0], requires_grad=True)
    returns = torch.tensor([2.0, 0.0, 1.0, 1.0])
    mask = torch.ones(4, dtype=torch.bool)
    result = value_loss(values, torch.zeros(4), returns, mask, value_clip=0.5)
    assert result.loss.tolist() == pytest.approx([1.125, 0.5, 0.245, 0.5])
    assert result.clipped.tolist() == [1, 0, 0, 0]
    result.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 1.0, -0.7, -1.0])
    plain = value_loss(values, torch.zeros(4), returns, mask, value_clip=None)
    assert plain.loss.tolist() == pytest.approx([0.5, 0.5, 0.245, 0.5])
    assert plain.clipped.tolist() == [0, 0, 0, 0]


def _slow_policy_loss(
    ratio: float, advantage: float, low: float, high: float, dual: float
) -> float:
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * min(max(ratio, 1 - low), dual)


def _slow_value_loss(value: float, old: float, target: float, clip: float) -> float:
    near = min(max(value, old - clip), old + clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


@few_examples
@given(ragged_batches, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.floats(1.6, 5))
def test_losses_agree_with_a_loop(batch: Ragged, low: float, high: float, dual: float) -> None:
    """Independent scalar formulas on random ragged batches; NaN off the actions is never read."""
    new, old, target = batch.normal(), batch.normal(), batch.normal()
    inputs = batch.poisoned(new), batch.poisoned(old), batch.poisoned(target), batch.action_mask
    policy = policy_loss(*inputs, clip_low=low, clip_high=high, dual_clip=dual).loss.tolist()
    value = value_loss(*inputs, value_clip=high).loss.tolist()
    for t, action in enumerate(batch.action_mask.tolist()):
        if not action:
            assert policy[t] == value[t] == 0
            continue
        triple = new[t].item(), old[t].item(), target[t].item()
        ratio = math.exp(triple[0] - triple[1])
        expected = _slow_policy_loss(ratio, triple[2], low, high, dual)
        assert policy[t] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        expected = _slow_value_loss(*triple, high)
        assert value[t] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@few_examples
@given(ragged_batches)
def test_gradients_are_zero_off_the_actions(batch: Ragged) -> None:
    """Even where the inputs hold NaN, the gradient is exactly 0 and never NaN."""
    new, value, entropy = (batch.poisoned(batch.normal()).requires_grad_() for _ in range(3))
    old, target = batch.poisoned(batch.normal()), batch.poisoned(batch.normal())
    mask = batch.action_mask
    total = policy_loss(new, old, target, mask, clip_low=0.2, clip_high=0.2).loss.sum()
    total = total + value_loss(value, old, target, mask, value_clip=0.5).loss.sum()
    total = total + entropy_loss(entropy, mask, 0.01).sum()
    total.backward()
    for leaf in (new, value, entropy):
        assert leaf.grad is not None and leaf.grad.isfinite().all()
        assert (leaf.grad[~mask] == 0).all()


def test_equal_policies_give_ratio_one_and_no_clipping() -> None:
    """C24/C30's share: before the first update ratio 1, KL 0, clip fraction 0, exactly."""
    batch = make_ragged([[0, 1, 1, 1], [0, 0, 1, 0, 1]])
    new = batch.normal().requires_grad_()
    advantage = batch.normal()
    result = policy_loss(
        new, new.detach(), advantage, batch.action_mask, clip_low=0.2, clip_high=0.2
    )
    assert (result.ratio == batch.action_mask.float()).all()
    assert not result.approx_kl.any() and not result.clipped.any()
    result.loss.sum().backward()
    assert new.grad is not None
    assert torch.equal(new.grad, torch.where(batch.action_mask, -advantage, 0.0))


@pytest.mark.parametrize("difference", [50.0, -50.0, 500.0, -500.0])
def test_extreme_ratios_stay_finite(difference: float) -> None:
    """A log-ratio far beyond float32's exponent gives finite losses, statistics and gradients."""
    new = torch.tensor([difference, difference], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    result = policy_loss(
        new, torch.zeros(2), torch.tensor([1.0, -1.0]), mask, clip_low=0.2, clip_high=0.2
    )
    result.loss.sum().backward()
    assert new.grad is not None
    for tensor in (result.loss, result.ratio, result.approx_kl, new.grad):
        assert tensor.isfinite().all()


def test_c23_global_token_mean() -> None:
    """C23: token losses [1,1,1,1] and [5] in two micro-batches average to 1.8, not 3.0."""
    micro_batches = [torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([5.0])]
    total = 0.0
    for wanted in micro_batches:
        mask = torch.ones(len(wanted), dtype=torch.bool)
        zeros = torch.zeros(len(wanted))
        total += (
            policy_loss(zeros, zeros, -wanted, mask, clip_low=0.2, clip_high=0.2).loss.sum().item()
        )
    assert total / 5 == pytest.approx(1.8)


@pytest.mark.parametrize("cuts", [[5], [1, 1, 1, 1, 1], [2, 2, 1], [3, 2], [4, 1]])
def test_c23_gradients_do_not_depend_on_the_cut(cuts: list[int]) -> None:
    """C23: five sequences, micro-batches of 5, 1, 2 and uneven ones: one gradient."""
    masks = [[0, 1, 1], [0, 1, 0, 1, 1], [1], [0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]
    batch = make_ragged(masks, seed=5)
    features = torch.randn(len(batch.action_mask), 4, generator=batch.generator)
    old, advantage, target = batch.normal(), batch.normal(), batch.normal()

    def gradient(sizes: list[int]) -> torch.Tensor:
        weight = torch.full((4,), 0.3, requires_grad=True)
        first = 0
        for size in sizes:
            rows = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[first + size]))
            first += size
            new, mask = features[rows] @ weight, batch.action_mask[rows]
            policy = policy_loss(new, old[rows], advantage[rows], mask, clip_low=0.2, clip_high=0.2)
            value = value_loss(new, old[rows], target[rows], mask, value_clip=0.5)
            ((policy.loss + value.loss).sum() / batch.action_mask.sum()).backward()
        assert weight.grad is not None
        return weight.grad

    whole = gradient([5])
    assert whole.norm() > 0.1
    assert (gradient(cuts) - whole).abs().max() <= 1e-6


@pytest.mark.parametrize("masks", [[[0, 0]], [[]], [[0], [0, 0, 0], []]])
def test_c32_no_action_gives_zero_loss(masks: list[list[int]]) -> None:
    """C32: responses that are all empty add 0 to every loss and gradient."""
    batch = make_ragged(masks)
    new = batch.normal().requires_grad_()
    mask = batch.action_mask
    policy = policy_loss(new, batch.normal(), batch.normal(), mask, clip_low=0.2, clip_high=0.2)
    value = value_loss(new, batch.normal(), batch.normal(), mask, value_clip=0.5)
    total = (policy.loss + value.loss).sum()
    total.backward()
    assert total.item() == 0 and new.grad is not None and not new.grad.any()


def test_entropy_loss_rewards_entropy() -> None:
    """The bonus is minus the coefficient times the entropy, on action tokens."""
    mask = torch.tensor([True, False, True])
    loss = entropy_loss(torch.tensor([2.0, torch.nan, 0.5]), mask, 0.1)
    assert loss.tolist() == pytest.approx([-0.2, 0.0, -0.05])
