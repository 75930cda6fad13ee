"""Group baselines and whitening: the field's cases, TRL as an oracle, and slow loops."""

from __future__ import annotations

import statistics
import warnings
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.ppo.advantages import (
    AdvantageEstimator,
    shape_scores,
    whiten,
    whiten_moments,
    whiten_statistics,
    zero_spread_fraction,
)
from tests.unit.ppo.ragged import Ragged, few_examples, make_ragged, ragged_batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns that its PPO is experimental
    from trl.experimental.ppo.ppo_trainer import masked_whiten


def _whitened(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return whiten(x, mask, *whiten_moments(whiten_statistics(x, mask)))


@pytest.mark.parametrize("estimator", ["rloo", "group_norm"])
@pytest.mark.parametrize(
    "scores",
    [[1.0, 1.0, 1.0, 1.0], [1.0], [0.1] * 7, [-1e6] * 3, [0.0, 0.0], [0.3]],
)
def test_c31_zero_spread_gives_exactly_zero(
    scores: list[float], estimator: AdvantageEstimator
) -> None:
    """C31: all-equal rewards, and a group of one sample."""
    shaped = shape_scores(
        torch.tensor(scores), torch.zeros(len(scores), dtype=torch.int64), estimator
    )
    assert shaped.tolist() == [0.0] * len(scores)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([0, *[0.95] * 7], [-0.95, *[0.95 / 7] * 7]),
        ([2, 0], [2, -2]),
        ([3, 3, 0], [1.5, 1.5, -3]),
    ],
)
def test_c31_leave_one_out(scores: list[float], expected: list[float]) -> None:
    """C31: each score minus the mean of the others, finite and small."""
    shaped = shape_scores(
        torch.tensor(scores, dtype=torch.float32),
        torch.zeros(len(scores), dtype=torch.int64),
        "rloo",
    )
    assert shaped.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("spread", [1e-7, 1e-6, 1e-3, 1.0, 1e6])
def test_c31_near_zero_spread_is_not_blown_up(spread: float) -> None:
    """C31: rounding noise in the scores gives small advantages, never beyond 10."""
    scores = 0.5 + spread * torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])
    for estimator in ("rloo", "group_norm"):
        shaped = shape_scores(scores, torch.zeros(8, dtype=torch.int64), estimator)
        assert shaped.isfinite().all()
        if estimator == "group_norm":
            assert shaped.abs().max() < 10
            if spread <= 1e-6:
                assert shaped.abs().max() < 0.01


@few_examples
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-9, 9, width=16)), min_size=1, max_size=20))
def test_baselines_agree_with_a_loop(rows: list[tuple[int, float]]) -> None:
    """Groups of unequal size, in any order, against the statistics module."""
    group_ids = torch.tensor([group for group, _ in rows])
    scores = torch.tensor([score for _, score in rows])
    leave_one_out = shape_scores(scores, group_ids, "rloo").tolist()
    normalised = shape_scores(scores, group_ids, "group_norm").tolist()
    flat = 0
    for i, (group, score) in enumerate(rows):
        others = [s for j, (g, s) in enumerate(rows) if g == group and j != i]
        if not others:
            assert leave_one_out[i] == normalised[i] == 0
            flat += 1
            continue
        assert leave_one_out[i] == pytest.approx(score - statistics.fmean(others), abs=1e-5)
        members = [*others, score]
        deviation = max(statistics.stdev(members), 1e-4)
        expected = (score - statistics.fmean(members)) / deviation
        assert normalised[i] == pytest.approx(expected, abs=1e-4)
    groups = {group: {s for g, s in rows if g == group} for group, _ in rows}
    equal = sum(len(values) == 1 for values in groups.values()) / len(groups)
    assert zero_spread_fraction(scores, group_ids) == pytest.approx(equal)


def test_estimators_without_baseline_leave_scores_alone() -> None:
    """GAE and REINFORCE take the scores as they are."""
    scores, groups = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])
    for estimator in ("gae", "reinforce"):
        assert torch.equal(shape_scores(scores, groups, estimator), scores)


def test_unknown_estimator_is_refused() -> None:
    """The error names the key and the choices."""
    with pytest.raises(ValueError, match=r"algo\.advantage\.estimator is 'grpo'; expected gae"):
        shape_scores(torch.zeros(1), torch.zeros(1).long(), cast(AdvantageEstimator, "grpo"))


def test_zero_spread_fraction_by_hand() -> None:
    """C31's metric: one of two groups has no spread; no samples, no fraction."""
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 0.5]), torch.tensor([4, 9, 4, 9])
    assert zero_spread_fraction(scores, groups) == 0.5
    assert zero_spread_fraction(scores[:0], groups[:0]) == 0.0


@pytest.mark.parametrize("pad", [100.0, -3.0, torch.nan, torch.inf])
def test_c22_whitening_ignores_what_is_masked(pad: float) -> None:
    """C22: [1,2,3] whitens to ±1.2247 (population), whatever stands behind it."""
    mask = torch.tensor([True, True, True, False])
    result = _whitened(torch.tensor([1.0, 2.0, 3.0, pad]), mask).tolist()
    assert result == pytest.approx([-1.224745, 0, 1.224745, 0], abs=1e-6)


def test_c22_whitening_over_ranks() -> None:
    """C22: rank 0 has [1,2,3], rank 1 has [11]; the mean is 4.25 on both."""
    parts = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([11.0])]
    masks = [torch.ones(len(part), dtype=torch.bool) for part in parts]
    total = torch.zeros(3, dtype=torch.float64)
    for part, mask in zip(parts, masks, strict=True):
        total += whiten_statistics(part, mask)
    mean, var = whiten_moments(total)
    assert mean.item() == 4.25
    assert var.item() == pytest.approx(statistics.pvariance([1, 2, 3, 11]))
    joined = torch.cat([whiten(p, m, mean, var) for p, m in zip(parts, masks, strict=True)])
    assert joined.mean().item() == pytest.approx(0, abs=1e-6)
    assert joined.square().mean().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("values", [[3.0], [0.1, 0.1, 0.1], [1e6] * 5, [-0.7] * 1000])
def test_c31_whitening_without_spread_gives_exactly_zero(values: list[float]) -> None:
    """C31: one token, or all equal, also where the mean is no short binary number."""
    mask = torch.ones(len(values), dtype=torch.bool)
    assert not _whitened(torch.tensor(values), mask).any()


def test_c32_whitening_nothing() -> None:
    """C32: no action token at all, as when all responses are empty."""
    mask = torch.zeros(4, dtype=torch.bool)
    result = _whitened(torch.full((4,), torch.nan), mask)
    assert result.tolist() == [0, 0, 0, 0]
    assert [float(m) for m in whiten_moments(whiten_statistics(result[:0], mask[:0]))] == [0, 0]


@few_examples
@given(ragged_batches, st.floats(-100, 100), st.floats(0.5, 50))
def test_whitening_agrees_with_trl(batch: Ragged, shift: float, scale: float) -> None:
    """TRL's masked_whiten, which divides by the sample variance instead of the population's."""
    count = int(batch.action_mask.sum())
    if count < 3:
        return
    x = shift + scale * batch.normal()
    mask = batch.action_mask
    oracle = masked_whiten(x.double(), mask.double()) * (count / (count - 1)) ** 0.5
    assert torch.allclose(_whitened(x, mask)[mask].double(), oracle[mask], atol=1e-4)


def test_statistics_do_not_depend_on_the_cut() -> None:
    """One token at a time or all at once, with a mean far above the spread: same moments."""
    batch = make_ragged([[1, 0] * 50], seed=2)
    x, mask = 1000 + 0.01 * batch.normal(), batch.action_mask
    whole = whiten_statistics(x, mask)
    cut = torch.stack([whiten_statistics(x[t : t + 1], mask[t : t + 1]) for t in range(100)]).sum(0)
    exact = statistics.pvariance(x[mask].double().tolist())
    for moments in (whiten_moments(whole), whiten_moments(cut)):
        assert moments[1].item() == pytest.approx(exact, rel=1e-4)
