"""KL estimators: hand-computed numbers, signs, and no overflow."""

from __future__ import annotations

import math
from typing import cast, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.ppo.advantages import token_rewards
from megappo.ppo.kl import KLEstimator, estimate_kl
from tests.unit.ppo.ragged import few_examples


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.1), ("k2", -0.05), ("k3", -0.0718281828)]
)
def test_c27_reward_part_of_one_token(estimator: KLEstimator, expected: float) -> None:
    """C27: beta .1, log-prob -2 against -1; a token that is no action adds nothing."""
    kl = estimate_kl(torch.tensor([-2.0, -9.0]), torch.tensor([-1.0, -1.0]), estimator)
    mask = torch.tensor([True, False])
    rewards = token_rewards(torch.zeros(1), kl, mask, torch.tensor([0, 2]), kl_coef=0.1)
    assert rewards.tolist() == [pytest.approx(expected, abs=1e-7), 0.0]
    logged = (kl * mask).sum() / mask.sum()
    assert -0.1 * logged.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("log_prob", "base", "k1", "k2", "k3"),
    [
        (-1.0, -2.0, 1.0, 0.5, math.exp(-1)),
        (-0.5, -0.5, 0.0, 0.0, 0.0),
        (-3.0, -0.5, -2.5, 3.125, math.exp(2.5) - 3.5),
        (-0.25, -8.25, 8.0, 32.0, math.exp(-8) + 7),
    ],
)
def test_c27_varied(log_prob: float, base: float, k1: float, k2: float, k3: float) -> None:
    """C27 varied: equal policies, and differences of both signs."""
    pair = torch.tensor([log_prob]), torch.tensor([base])
    values = [estimate_kl(*pair, name).item() for name in get_args(KLEstimator)]
    assert values == pytest.approx([k1, k2, k3], rel=1e-6, abs=1e-7)


@few_examples
@given(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32))
def test_k2_and_k3_are_finite_and_not_negative(log_prob: float, base: float) -> None:
    """Whatever the log-probabilities, k2 and k3 are finite and at least 0."""
    for name in ("k2", "k3"):
        value = estimate_kl(torch.tensor([log_prob]), torch.tensor([base]), name).item()
        assert math.isfinite(value) and value >= 0


def test_k3_is_exact_for_small_and_bounded_for_large_differences() -> None:
    """Small differences do not cancel; beyond a log-ratio of -20 the estimate stays put."""
    difference = torch.tensor([1e-3, -1e-3, -19.0, -21.0, -5000.0])
    value = estimate_kl(difference, torch.zeros(5), "k3").tolist()
    exact = [math.expm1(-d) + d for d in (1e-3, -1e-3, -19.0, -20.0, -20.0)]
    assert value == pytest.approx(exact, rel=1e-3)


def test_estimates_average_to_the_divergence() -> None:
    """Weighted with the policy's probabilities, k1 and k3 give the exact KL."""
    policy = torch.tensor([0.5, 0.3, 0.2])
    base = torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / base).log()).sum().item()
    for name in ("k1", "k3"):
        mean = (policy * estimate_kl(policy.log(), base.log(), name)).sum().item()
        assert mean == pytest.approx(exact, abs=1e-6)


def test_half_precision_is_computed_in_float32() -> None:
    """The difference of two bfloat16 log-probabilities is not rounded to bfloat16."""
    pair = torch.tensor([-3.0], dtype=torch.bfloat16), torch.tensor([-0.0078125]).bfloat16()
    value = estimate_kl(*pair, "k1")
    assert value.dtype == torch.float32 and value.item() == -2.9921875


def test_unknown_estimator_is_refused() -> None:
    """The error names the key and the choices."""
    with pytest.raises(ValueError, match=r"algo\.kl\.estimator is 'k4'; expected k1, k2 or k3"):
        estimate_kl(torch.zeros(1), torch.zeros(1), cast(KLEstimator, "k4"))
